package cluster

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// TestBounded: the end of an answer that is too long isn't kept, however it is copied.
func TestBounded(t *testing.T) {
	var b bounded
	if _, err := io.Copy(&b, strings.NewReader("all of it")); err != nil || b.String() != "all of it" || b.over() {
		t.Errorf("%q, %v", b.String(), err)
	}
	_, err := io.Copy(&b, io.LimitReader(zeros{}, outputAtMost+1))
	if !errors.Is(err, errTooLong) || !b.over() || len(b.String()) > outputAtMost {
		t.Errorf("%d bytes are kept, %v", len(b.String()), err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
