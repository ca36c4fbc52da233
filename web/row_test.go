package web

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

// TestRowsNameEveryEndpoint: those that have no dot are told once, and again when
// they change.
func TestRowsNameEveryEndpoint(t *testing.T) {
	of := func(n int, total uint64) *plan.ServiceStatus {
		s := &plan.ServiceStatus{Name: "web", Connections: plan.Connections{Total: total}}
		for i := range n {
			s.Endpoints = append(s.Endpoints, plan.EndpointStatus{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}), 80)})
		}
		return s
	}
	var was *Row
	for _, tt := range []struct {
		name      string
		endpoints int
		has, told string // others, in the row and in what the streams are told
	}{
		{"few", maxDots, ``, ``},
		{"more come", maxDots + 2, `["10.2.0.12:80","10.2.0.13:80"]`, `["10.2.0.12:80","10.2.0.13:80"]`},
		{"something else changes", maxDots + 2, `["10.2.0.12:80","10.2.0.13:80"]`, ``},
		{"one goes", maxDots + 1, `["10.2.0.12:80"]`, `["10.2.0.12:80"]`},
		{"all of them go", maxDots, ``, `[]`},
		{"again something else", maxDots, ``, ``},
	} {
		row := newRow(was, of(tt.endpoints, uint64(len(tt.name))), Rates{}, start)
		for what, check := range map[string]struct {
			row  *Row
			want string
		}{"row": {row, tt.has}, "told": {row.since(was), tt.told}} {
			b, err := json.Marshal(check.row)
			if err != nil {
				t.Fatal(err)
			}
			_, got, _ := strings.Cut(strings.TrimSuffix(string(b), "}"), `,"others":`)
			if d := cmp.Diff(check.want, got); d != "" {
				t.Errorf("%s: others in %s (-want +got):\n%s", tt.name, what, d)
			}
		}
		if again := newRow(row, of(tt.endpoints, uint64(len(tt.name))), Rates{}, start); again != row {
			t.Errorf("%s: the same made another row", tt.name)
		}
		was = row
	}
}
