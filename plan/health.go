package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Targets returns the probes that the endpoints of s need, sorted, each once in a
// namespace, however many of its service ports share it: those of every endpoint that some
// traffic policy could choose, here or, when nodes come and go, later. An
// endpoint that isn't ready is not probed before it is, and one in an excluded
// network never.
func Targets(s *service.Snapshot, d health.Defaults, exclude ...netip.Prefix) []health.Wanted {
	if s == nil {
		return nil
	}
	view := health.NewView(d, nil)
	seen := map[health.Wanted]bool{}
	var out []health.Wanted
	for p, eps := range s.All() {
		if d.Fill(p.Health, p.Protocol).Kind == service.CheckOff {
			continue
		}
		for i := range eps {
			if !eps[i].Ready && !(eps[i].Serving && eps[i].Terminating) || contains(exclude, eps[i].Address.Addr()) {
				continue
			}
			if w := (health.Wanted{Target: view.Target(p, eps[i].Address), Namespace: p.Namespace}); !seen[w] {
				seen[w] = true
				out = append(out, w)
			}
		}
	}
	slices.SortFunc(out, compareTargets)
	return out
}

// SameTargets reports whether the endpoints that are probed are the same before d
// and after: no service port has changed its specification or its endpoints but
// those whose endpoints aren't probed.
func (d Delta) SameTargets(defaults health.Defaults) bool {
	probed := func(s *Service) bool {
		return s != nil && defaults.Fill(s.Port.Health, s.Port.Protocol).Kind != service.CheckOff
	}
	return !slices.ContainsFunc(d.Changes, func(c Change) bool {
		specified := c.Was == nil || c.Is == nil || c.Was.entry != c.Is.entry
		return specified && (probed(c.Was) || probed(c.Is))
	})
}

func compareTargets(a, b health.Wanted) int {
	x, y := a.Check, b.Check
	return cmp.Or(
		a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Path, y.Path), cmp.Compare(x.Port, y.Port),
		cmp.Compare(x.Interval, y.Interval), cmp.Compare(x.Timeout, y.Timeout),
		cmp.Compare(x.Rise, y.Rise), cmp.Compare(x.Fall, y.Fall), cmp.Compare(a.Namespace, b.Namespace),
	)
}

// HealthPort is a Service's health-check node port in one family: there load
// balancers ask each node whether it has endpoints for them.
type HealthPort struct {
	Family          service.Family
	Port            uint16
	Namespace, Name string // of the Service
	// Endpoints is the number of addresses on this node with a ready endpoint of
	// any of the Service's ports. One that terminates doesn't count.
	Endpoints int
	// Problem says why kproxy doesn't answer there; empty if nothing is wrong.
	Problem string

	created time.Time // of the Service
}

// HealthPorts returns what p wants to be answered at health-check node ports,
// in order of family, port and Service, the older first. As in kube-proxy each family has a
// server and a count of its own. A Service that is left to another proxy has none.
func HealthPorts(p *Plan) []HealthPort {
	var out []HealthPort
	var last *service.Port
	var counts [2]healthCount
	flush := func() {
		for f := range counts {
			if last != nil && counts[f].served {
				out = append(out, HealthPort{
					Family: service.Family(f), Port: last.HealthCheckNodePort, Namespace: last.Namespace, Name: last.Name,
					Endpoints: len(counts[f].addresses), created: last.Created,
				})
			}
			counts[f] = healthCount{}
		}
	}
	for _, s := range p.Services { // in key order: the ports of a Service follow each other
		if s.Port.HealthCheckNodePort == 0 {
			continue
		}
		if last == nil || last.Namespace != s.Port.Namespace || last.Name != s.Port.Name {
			flush()
		}
		last = s.Port
		for f, has := range families(s.Port) {
			if has {
				counts[f].add(s, service.Family(f), len(p.Policy.ExcludeCIDRs) > 0)
			}
		}
	}
	flush()
	if len(out) > 0 {
		settleHealthPorts(p, out)
	}
	return out
}

// SameHealthPorts reports whether nothing of d concerns health-check node ports, so
// that there is no need to look at every service.
func (d Delta) SameHealthPorts() bool {
	// A node port may take its number away from another Service.
	concerned := func(s *Service) bool { return s != nil && (s.Port.HealthCheckNodePort != 0 || s.Port.NodePort != 0) }
	return !slices.ContainsFunc(d.Changes, func(c Change) bool { return concerned(c.Was) || concerned(c.Is) })
}

// healthCount gathers what one Service's ports have in one family.
type healthCount struct {
	served    bool
	addresses map[netip.Addr]bool
}

// add adds a port of the Service; another says that there may be another proxy.
func (h *healthCount) add(s *Service, f service.Family, another bool) {
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if a := e.Address.Addr(); service.FamilyOf(a) == f && !e.Excluded && e.Local && e.Ready && !e.Terminating {
			if h.addresses == nil {
				h.addresses = map[netip.Addr]bool{}
			}
			h.addresses[a] = true
		}
	}
	// Without any endpoint, kproxy can't tell whose the Service is. Where there is another
	// proxy, the port is left to it: a load balancer takes a refusal as it takes a 503.
	all, theirs := s.others()
	h.served = h.served || theirs[f] < all[f] || all[f] == 0 && !another
}

// settleHealthPorts sorts ports and says of those that can't be answered why:
// another Service has the port, as its own health-check node port or as a node
// port, whose connections go to endpoints before a server here would see them.
func settleHealthPorts(p *Plan, ports []HealthPort) {
	slices.SortFunc(ports, func(a, b HealthPort) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Port, b.Port), a.created.Compare(b.created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	nodePorts := map[uint16]service.Key{}
	for _, s := range p.Services {
		if s.Port.NodePort != 0 && s.Port.Protocol == service.TCP {
			nodePorts[s.Port.NodePort] = s.Port.Key
		}
	}
	const remedy = ": load balancers can't learn whether this node has endpoints; give one of the two another port"
	var first *HealthPort // of those that want a port
	for i := range ports {
		h := &ports[i]
		if first == nil || first.Family != h.Family || first.Port != h.Port {
			first = h
		}
		if k, taken := nodePorts[h.Port]; taken {
			h.Problem = fmt.Sprintf("its health check node port %d is the node port of %s%s", h.Port, k, remedy)
		} else if first != h {
			why := "comes first by name"
			if first.created.Before(h.created) {
				why = "is older"
			}
			h.Problem = fmt.Sprintf("its health check node port %d belongs to %s/%s, which %s%s", h.Port, first.Namespace, first.Name, why, remedy)
		}
	}
}
