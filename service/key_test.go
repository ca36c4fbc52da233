package service

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseProtocol(t *testing.T) {
	cases := map[string]struct {
		want  Protocol
		error string
	}{
		"TCP":   {want: TCP},
		"tcp":   {want: TCP},
		"Udp":   {want: UDP},
		"SCTP":  {want: SCTP},
		"":      {error: `protocol "" is not one of TCP, UDP, SCTP`},
		"DCCP":  {error: `protocol "DCCP" is not one of TCP, UDP, SCTP`},
		" TCP ": {error: `protocol " TCP " is not one of TCP, UDP, SCTP`},
	}
	for in, c := range cases {
		got, err := ParseProtocol(in)
		if got != c.want || errorText(err) != c.error {
			t.Errorf("ParseProtocol(%q) = %v, %q, want %v, %q", in, got, errorText(err), c.want, c.error)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestProtocolInJSON(t *testing.T) {
	for p, want := range map[Protocol]string{TCP: `"TCP"`, UDP: `"UDP"`, SCTP: `"SCTP"`} {
		got, err := json.Marshal(p)
		if err != nil || string(got) != want {
			t.Errorf("marshal %v: %s, %v, want %s", p, got, err, want)
		}
		var back Protocol
		if err := json.Unmarshal(got, &back); err != nil || back != p {
			t.Errorf("unmarshal %s: %v, %v, want %v", got, back, err, p)
		}
	}
	if got := Protocol(50).String(); got != "proto-50" {
		t.Errorf("protocol 50 is %q, want proto-50", got)
	}
	var p Protocol
	if err := json.Unmarshal([]byte(`"ESP"`), &p); err == nil {
		t.Error("ESP was accepted as a protocol")
	}
}

func TestFamily(t *testing.T) {
	cases := map[string]Family{
		"10.0.0.1":        IPv4,
		"::ffff:10.0.0.1": IPv4,
		"fd00::1":         IPv6,
		"::":              IPv6,
	}
	for in, want := range cases {
		if got := FamilyOf(netip.MustParseAddr(in)); got != want {
			t.Errorf("FamilyOf(%s) = %v, want %v", in, got, want)
		}
	}
	for f, want := range map[Family]struct {
		name string
		bits int
	}{IPv4: {"ipv4", 32}, IPv6: {"ipv6", 128}} {
		if f.String() != want.name || f.Bits() != want.bits || Families[f] != f {
			t.Errorf("family %d is %s of %d bits at %v, want %v at its own place", f, f, f.Bits(), Families[f], want)
		}
	}
}

func TestKeyString(t *testing.T) {
	if got := (Key{Namespace: "a", Name: "b", Protocol: TCP}).String(); got != "a/b" {
		t.Errorf("unnamed port: %q, want a/b", got)
	}
	if got := (Key{Namespace: "a", Name: "b", Port: "dns", Protocol: UDP}).String(); got != "a/b:dns" {
		t.Errorf("named port: %q, want a/b:dns", got)
	}
}

// Keys are in order of their fields, most significant first.
func TestKeyCompare(t *testing.T) {
	sorted := []Key{
		{"a", "a", "", TCP},
		{"a", "a", "", UDP},
		{"a", "a", "dns", TCP},
		{"a", "a", "dns", UDP},
		{"a", "a", "dns", SCTP},
		{"a", "a-b", "", TCP},
		{"a", "b", "", TCP},
		{"a-b", "a", "", TCP},
		{"b", "a", "", TCP},
	}
	for i, a := range sorted {
		for j, b := range sorted {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := a.Compare(b); got != want {
				t.Errorf("compare %v with %v: %d, want %d", a, b, got, want)
			}
		}
	}
	shuffled := slices.Clone(sorted)
	slices.Reverse(shuffled)
	slices.SortFunc(shuffled, Key.Compare)
	if diff := cmp.Diff(sorted, shuffled); diff != "" {
		t.Errorf("sorted (-want +got):\n%s", diff)
	}
}

// What ParseProtocol accepts is what it prints, in any case.
func FuzzParseProtocol(f *testing.F) {
	for _, s := range []string{"TCP", "udp", "Sctp", "", "proto-6"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParseProtocol(s)
		if err == nil && !strings.EqualFold(p.String(), s) {
			t.Errorf("%q became %v", s, p)
		}
	})
}

func TestIsScheduler(t *testing.T) {
	for name, want := range map[string]bool{
		"rr": true, "wlc": true, "sed": true, "my_own-sched-15": true, "0": true,
		"": false, "sixteen-letters-": false, "RR": false, "r r": false, "rr\n": false, "rü": false,
	} {
		if got := IsScheduler(name); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}
