package source

import (
	"net/netip"
	"testing"
)

func TestParseAddr(t *testing.T) {
	cases := map[string]string{ // "" where it is refused
		"10.0.0.1":             "10.0.0.1",
		"010.000.0000.01":      "10.0.0.1",
		"192.168.099.1":        "192.168.99.1", // decimal, though 099 is no octal number
		"::ffff:10.0.0.1":      "10.0.0.1",
		"::ffff:a00:1":         "10.0.0.1",
		"::ffff:010.0.0.1":     "10.0.0.1",
		"FD00::1":              "fd00::1",
		"fd00:0:0:0:0:0:0:1":   "fd00::1",
		"fe80::1%eth0":         "",
		"10.0.0":               "",
		"10.0.0.256":           "",
		"10.0.0.1 ":            "",
		"10.0.0.1/32":          "",
		"":                     "",
		"None":                 "",
		"[fd00::1]":            "",
		"web.default.svc":      "",
		"10.0.0.1.in-addr.foo": "",
	}
	for in, want := range cases {
		got, err := ParseAddr(in)
		switch {
		case want == "" && err == nil:
			t.Errorf("%q was accepted as %v", in, got)
		case want != "" && (err != nil || got.String() != want):
			t.Errorf("%q: %v, %v, want %s", in, got, err, want)
		}
	}
}

func TestParsePrefix(t *testing.T) {
	cases := map[string]string{
		"10.0.0.0/8":           "10.0.0.0/8",
		" 10.1.2.3/8\n":        "10.0.0.0/8",
		"010.0.0.0/08":         "10.0.0.0/8",
		"0.0.0.0/0":            "0.0.0.0/0",
		"::/0":                 "::/0",
		"fd00::1/64":           "fd00::/64",
		"::ffff:10.1.0.0/112":  "10.1.0.0/16",
		"::ffff:010.1.0.0/112": "10.1.0.0/16",
		"::ffff:10.1.0.0/80":   "::/80",
		"10.0.0.0/33":          "",
		"10.0.0.0":             "",
		"":                     "",
		"fe80::%eth0/64":       "",
	}
	for in, want := range cases {
		got, err := ParsePrefix(in)
		switch {
		case want == "" && err == nil:
			t.Errorf("%q was accepted as %v", in, got)
		case want != "" && (err != nil || got.String() != want):
			t.Errorf("%q: %v, %v, want %s", in, got, err, want)
		}
	}
}

// What is accepted is in normal form: it reads back as itself.
func FuzzParseAddr(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "010.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.0/8", " ::ffff:10.0.0.0/96"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if a, err := ParseAddr(s); err == nil {
			if back, err := netip.ParseAddr(a.String()); err != nil || back != a || a.Is4In6() || a.Zone() != "" {
				t.Errorf("%q became %v, which reads back as %v, %v", s, a, back, err)
			}
		}
		if p, err := ParsePrefix(s); err == nil {
			if back, err := netip.ParsePrefix(p.String()); err != nil || back != p || p != p.Masked() {
				t.Errorf("%q became %v, which reads back as %v, %v", s, p, back, err)
			}
		}
	})
}
