package plan

import (
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// contests says who doesn't get the places that several service ports want.
// It is immutable.
type contests struct {
	lost map[service.Key]map[place]*service.Port // loser, place, winner
}

// contest settles who has which place. The older service keeps it; of equally
// old ones the first in key order.
func (c *computation) contest() *contests {
	n := c.snapshot.Len()
	winners := make(map[place]*service.Port, 2*n)
	contested := false
	for i := range n {
		p, _, _ := c.snapshot.At(i)
		eachPlace(p, func(_ Kind, at place) {
			w := winners[at]
			if w == nil || p.Created.Before(w.Created) { // key order: w comes first
				winners[at] = p
			}
			contested = contested || w != nil
		})
	}
	out := &contests{}
	if !contested {
		return out
	}
	out.lost = map[service.Key]map[place]*service.Port{}
	for i := range n {
		p, _, _ := c.snapshot.At(i)
		eachPlace(p, func(_ Kind, at place) {
			if w := winners[at]; w != p {
				if out.lost[p.Key] == nil {
					out.lost[p.Key] = map[place]*service.Port{}
				}
				out.lost[p.Key][at] = w
			}
		})
	}
	return out
}

// wantSame reports whether two specifications want the same places.
func wantSame(a, b *service.Port) bool {
	return a.Created.Equal(b.Created) && a.Number == b.Number && a.NodePort == b.NodePort &&
		slices.Equal(a.ClusterIPs, b.ClusterIPs) &&
		slices.Equal(a.ExternalIPs, b.ExternalIPs) &&
		slices.Equal(a.LoadBalancerIPs, b.LoadBalancerIPs)
}

// sentences says what p lost and to whom, in the order of its places.
func (c *contests) sentences(p *service.Port) []string {
	lost := c.lost[p.Key]
	if len(lost) == 0 {
		return nil
	}
	var out []string
	eachPlace(p, func(k Kind, at place) {
		w := lost[at]
		if w == nil {
			return
		}
		why := "which comes first by name"
		if w.Created.Before(p.Created) {
			why = "which is older"
		}
		s := fmt.Sprintf("%s belongs to %s, %s", at, w.Key, why)
		if !slices.Contains(out, s) { // a node port of both families
			out = append(out, s)
		}
	})
	return out
}

// String returns "10.96.0.10:80 (TCP)" or "node port 30080 (TCP)".
func (at place) String() string {
	proto := strings.ToUpper(at.protocol.String())
	if !at.address.Addr().IsValid() {
		return fmt.Sprintf("node port %d (%s)", at.address.Port(), proto)
	}
	return fmt.Sprintf("%s (%s)", at.address, proto)
}
