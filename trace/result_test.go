package trace

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
)

// TestExplainChoice: no endpoint that might serve goes without a reason when another gets
// all connections.
func TestExplainChoice(t *testing.T) {
	const stays, next, other = "the client stays with 10.2.0.2:9000", "the client's next connection goes to 10.2.0.2:9000", "its health check fails"
	for _, tt := range []struct {
		name     string
		affinity bool
		shares   [3]float64
		why      [3]string // before
		want     [3]string
	}{
		{"affinity in the kernel", true, [3]float64{1, 0, 0}, [3]string{}, [3]string{whyAffinity, stays, stays}},
		{"affinity in userspace", true, [3]float64{1, 0, 0}, [3]string{whyAffinity, "", other}, [3]string{whyAffinity, stays, other}},
		{"affinity that has yet to begin", true, [3]float64{1, 0, 0}, [3]string{"round-robin", "", ""}, [3]string{"round-robin", next, next}},
		{"by the client's address", false, [3]float64{1, 0, 0}, [3]string{"hash", "", ""}, [3]string{"hash", next, next}},
		{"in turn", true, [3]float64{0.5, 0.5, 0}, [3]string{}, [3]string{}},
		{"the only one", true, [3]float64{1, 0, 0}, [3]string{"", other, other}, [3]string{"", other, other}},
	} {
		var all []Candidate
		for i := range tt.shares {
			all = append(all, Candidate{
				Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(2 + i)}), 9000), Usable: tt.why[i] != other,
				Probability: tt.shares[i], Why: tt.why[i],
			})
		}
		explainChoice(all, tt.affinity)
		if diff := cmp.Diff(tt.want, [3]string{all[0].Why, all[1].Why, all[2].Why}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// TestEjectedCandidates: an endpoint that is ejected is listed, with why no packet goes there, or why one does all the same.
func TestEjectedCandidates(t *testing.T) {
	dead := func(p *plan.Plan, which ...int) *plan.Plan {
		for _, i := range which {
			e := &p.Services[0].Endpoints[i]
			e.Usable = len(which) == len(p.Services[0].Endpoints)
			e.Probed = &plan.Probed{Health: "unknown", Ejected: &health.Ejection{Since: time.Now(), Reason: health.Silent, Evidence: "unanswered SYNs of 3 clients", Probes: 4}}
		}
		return p
	}
	toOne := strings.ReplaceAll(toEndpoints, "10.2.0.3:9000", "10.2.0.2:9000")
	const why = "ejected: silent to 4 probes after unanswered SYNs of 3 clients, 0s"
	const deadText, used = "endpoint 10.2.0.3:9000 doesn't take connections: ", "; used, as all are when none is up"
	for name, c := range map[string]struct {
		rules string
		proxy *Proxy
		share float64
		why   string
	}{
		"iptables":       {toOne, forecasts(dead(onePlan(plan.IPTables), 1), ""), 0, "would be used, but is " + why},
		"userspace":      {toUserspace, forecasts(dead(onePlan(plan.Userspace), 1), "", 1, 0), 0, "would be used, but is " + why},
		"all, iptables":  {toEndpoints, forecasts(dead(onePlan(plan.IPTables), 0, 1), ""), 0.5, deadText + why + used},
		"all, userspace": {toUserspace, forecasts(dead(onePlan(plan.Userspace), 0, 1), "", 0.5, 0.5), 0.5, deadText + why + used},
	} {
		s := usual()
		s.rules, s.listening = c.rules, []string{"0.0.0.0:10244"}
		for _, got := range s.trace(t, "10.1.0.2", "10.96.0.10:80", c.proxy).Candidates {
			if got.Endpoint.String() == "10.2.0.3:9000" && (got.Probability != c.share || got.Why != c.why || got.Health != "down") {
				t.Errorf("%s: %+v, want share %v, down: %s", name, got, c.share, c.why)
			}
		}
	}
}
