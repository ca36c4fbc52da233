package kerneltest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestTableIsWhatPlansSay: the table, which is written by hand, agrees with what a
// plan says of every connection, which userspace goes by.
func TestTableIsWhatPlansSay(t *testing.T) {
	n := &Network{t: t, hosts: make([]netns.NsHandle, hosts)}
	known := map[string]offer{}
	for _, o := range offers(n) {
		known[o.name] = o
	}
	for _, sc := range flowScenes() {
		policy := plan.DefaultPolicy()
		sc.policy(n, &policy)
		p := offloaded(t, Mode{Mode: plan.ModeIPTables, Plane: plan.IPTables}, policy, n)
		for _, r := range sc.rows {
			s := p.Find(known[r.offer].key(service.TCP))
			if s == nil {
				t.Fatalf("%s: no offer %q", sc.name, r.offer)
			}
			for _, f := range service.Families {
				i := slices.IndexFunc(s.Frontends, func(fe plan.Frontend) bool { return fe.Kind == r.kind && fe.Family == f })
				for c, client := range clients {
					if got := said(n, p, s, &s.Frontends[i], client); got != r.expect[c] {
						t.Errorf("%s: %s to the %s %s of %q: the plan says %s, the table %s",
							sc.name, hostNames[client], f, r.kind, r.offer, got, r.expect[c])
					}
				}
			}
		}
	}
}

// said is what a plan says of a client's connections.
func said(n *Network, p *plan.Plan, s *plan.Service, f *plan.Frontend, client int) string {
	c := n.client(f.Family, client)
	if c.Node {
		c.Address = n.NodeAddress(f.Family, outside)
	}
	if f.Kind == plan.NodePort && !p.Policy.AnswersNodePorts(n.NodeAddress(f.Family, max(client, 1))) {
		return refused
	}
	switch s.VerdictFor(f, c, &p.Policy) {
	case plan.Drop:
		return silence
	case plan.Reject:
		return refused
	}
	var out []string
	for _, b := range s.Backends(f, c, &p.Policy) {
		for _, host := range []int{two, three} {
			if b.Address.Addr() != n.Address(f.Family, host) {
				continue
			}
			seen := client
			if f.Masquerades(c, b.Address.Addr(), &p.Policy) {
				seen = node
			}
			out = append(out, fmt.Sprintf("%s:%s", hostNames[host], hostNames[seen]))
		}
	}
	return strings.Join(out, " ")
}
