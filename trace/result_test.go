package trace

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
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
