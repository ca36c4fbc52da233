package cluster

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// A kproxy whose command line doesn't know a command or flag is an older one; one that refuses what it knows isn't.
func TestExitError(t *testing.T) {
	for message, want := range map[string]State{
		`kproxy: there is no command "kproxy pin" (see kproxy --help)`:                                 Older,
		"kproxy: there is no flag --diff (see kproxy render --help)":                                   Older,
		"kproxy: there is no flag --diff, did you mean --dir? (see kproxy render --help)":              Older,
		`kproxy: there is no service "default/servr", did you mean default/server?`:                    Failed,
		"kproxy: pin takes a service and one of userspace, kernel, auto":                               Failed,
		"kproxy: --config: open /var/lib/kube-proxy/config.conf: no such file (see kproxy run --help)": Failed,
	} {
		if got := troubleOf(exitError(2, message), time.Second); got.State != want || !strings.Contains(got.Text, strings.TrimPrefix(message, "kproxy: ")) {
			t.Errorf("%s: %v, want %s", message, got, want)
		}
	}
	if got := troubleOf(exitError(1, "kproxy: there is no room (see df --help)"), time.Second); got.State != Failed {
		t.Errorf("of status 1: %v", got)
	}
}

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
