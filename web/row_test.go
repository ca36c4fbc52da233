package web

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
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

// TestRowOfEjected: a row names the fault, and is the same row while only time passes.
func TestRowOfEjected(t *testing.T) {
	e := &health.Ejection{Since: start, Reason: health.Silent, Evidence: "unanswered SYNs of 3 clients", Probes: 4}
	at := func(seconds time.Duration) *plan.ServiceStatus {
		return &plan.ServiceStatus{Name: "web", Endpoints: []plan.EndpointStatus{{Address: netip.MustParseAddrPort("10.2.0.2:80"), Health: "down", Ejected: e, LastError: e.Text(start.Add(seconds * time.Second))}}}
	}
	row := newRow(nil, at(1), Rates{}, start)
	if want := "10.2.0.2:80 is down: ejected: silent to 4 probes after unanswered SYNs of 3 clients"; row.Fault != want {
		t.Errorf("fault %q, want %q", row.Fault, want)
	}
	if again := newRow(row, at(2), Rates{}, start); again != row {
		t.Errorf("a second later it is another row: %q", again.Fault)
	}
}
