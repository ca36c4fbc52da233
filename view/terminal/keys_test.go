package terminal

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/view"
)

func TestParseKey(t *testing.T) {
	for _, c := range []struct {
		in   string
		all  bool
		want []view.Key
		rest string
	}{
		{"q/é", false, []view.Key{"q", "/", "é"}, ""},
		{"\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[4~", false, []view.Key{view.KeyUp, view.KeyDown, view.KeyPageUp, view.KeyPageDown, view.KeyHome, view.KeyEnd}, ""},
		{"\x03\x1a\x7f\r", false, []view.Key{view.KeyInterrupt, keySuspend, view.KeyBackspace, view.KeyEnter}, ""},
		{"a\x1b", false, []view.Key{"a"}, "\x1b"},
		{"\x1b", true, []view.Key{view.KeyEscape}, ""},
		{"\x1b[5", false, nil, "\x1b[5"},
		{"\x1b[5", true, []view.Key{""}, ""},
		{"\x1bq", false, []view.Key{view.KeyEscape, "q"}, ""},
		{"\x1b[1;5Cx", false, []view.Key{"", "x"}, ""}, // Ctrl-Right has no meaning
		{"\xc3", false, nil, "\xc3"},                   // half of é
		{"\xffx", false, []view.Key{"", "x"}, ""},
	} {
		var got []view.Key
		b := []byte(c.in)
		for len(b) > 0 {
			k, n := parseKey(b, c.all)
			if n == 0 {
				break
			}
			got, b = append(got, k), b[n:]
		}
		if diff := cmp.Diff(c.want, got); diff != "" || string(b) != c.rest {
			t.Errorf("%q: rest %q (-want +got):\n%s", c.in, b, diff)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add([]byte("\x1b[5~q"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			_, n := parseKey(b, true)
			if n <= 0 || n > len(b) {
				t.Fatalf("%q: a key of %d bytes", b, n)
			}
			b = b[n:]
		}
	})
}
