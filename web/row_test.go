package web

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

// A row of a service without problems or endpoints has empty lists of them.
func TestRowHasLists(t *testing.T) {
	b, err := json.Marshal(newRow(nil, &plan.ServiceStatus{Name: "web"}, Rates{}, start))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"problems":[]`, `"dots":[]`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s in %s", want, b)
		}
	}
}

// TestRowsNameEveryEndpoint: those without a dot are among the others, and the same
// status makes no other row.
func TestRowsNameEveryEndpoint(t *testing.T) {
	var was *Row
	for _, tt := range []struct{ endpoints, others int }{{3, 0}, {maxDots, 0}, {maxDots + 2, 2}, {maxDots + 1, 1}} {
		s := &plan.ServiceStatus{Name: "web"}
		var want []netip.AddrPort
		for i := range tt.endpoints {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}), 80)
			s.Endpoints = append(s.Endpoints, plan.EndpointStatus{Address: a})
			want = append(want, a)
		}
		row := newRow(was, s, Rates{}, start)
		var got []netip.AddrPort
		for _, d := range row.Dots {
			got = append(got, d.Address)
		}
		if d := cmp.Diff(want, append(got, row.Others...), cmp.Comparer(equalAddrPort)); d != "" || len(row.Others) != tt.others {
			t.Errorf("%d endpoints, %d others (-want +got):\n%s", tt.endpoints, len(row.Others), d)
		}
		if row == was {
			t.Errorf("%d endpoints make no other row", tt.endpoints)
		}
		if again := newRow(row, s, Rates{}, start); again != row {
			t.Errorf("%d endpoints: the same status made another row", tt.endpoints)
		}
		was = row
	}
}
