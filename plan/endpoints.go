package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// selection lists the endpoints of one family that the traffic policies choose,
// before health and weights. Its lists hold indices into the service port's
// endpoints, in order.
type selection struct {
	cluster []int
	local   []int
	// anywhere are those that some node could use: ready, or the fallback.
	anywhere []int
}

// selectEndpoints chooses as kube-proxy v1.36 does (pkg/proxy/topology.go):
// the Cluster list holds the ready endpoints that pass the topology hints, or
// where there is none, all that still serve while they terminate; the Local
// list holds the ready endpoints on this node whatever their hints, or where
// there is none, those on this node that serve while they terminate. Those that
// another proxy serves count for nothing.
func selectEndpoints(rows []Endpoint, f service.Family, node service.Node) selection {
	topology := topologyOf(rows, f, node)
	var s selection
	var terminating, localTerminating []int
	for i := range rows {
		e := &rows[i]
		switch {
		case e.Excluded || service.FamilyOf(e.Address.Addr()) != f:
		case e.Ready:
			s.anywhere = append(s.anywhere, i)
			if topology.allows(e.Endpoint, node) {
				s.cluster = append(s.cluster, i)
			}
			if e.Local {
				s.local = append(s.local, i)
			}
		case e.Serving && e.Terminating:
			s.anywhere = append(s.anywhere, i)
			terminating = append(terminating, i)
			if e.Local {
				localTerminating = append(localTerminating, i)
			}
		}
	}
	if len(s.cluster) == 0 {
		s.cluster = terminating
	}
	if len(s.local) == 0 {
		s.local = localTerminating
	}
	return s
}

// topology says which hints of the endpoints are in force.
type topology uint8

const (
	anyTopology topology = iota
	sameZone
	sameNode
)

// topologyOf decides which hints are in force, as kube-proxy does: those for
// nodes if every ready endpoint has some and one names this node; else those
// for zones if every ready endpoint has some and one names this node's zone;
// else none. One endpoint without a hint means that the controller is about
// to add or to withdraw hints, and following a part of them would overload
// the endpoints that have them.
func topologyOf(rows []Endpoint, f service.Family, node service.Node) topology {
	allNode, allZone := true, true
	forNode, forZone := false, false
	for i := range rows {
		e := &rows[i]
		if !e.Ready || e.Excluded || service.FamilyOf(e.Address.Addr()) != f {
			continue
		}
		allNode = allNode && len(e.NodeHints()) > 0
		allZone = allZone && len(e.ZoneHints()) > 0
		forNode = forNode || hinted(e.NodeHints(), node.Name)
		forZone = forZone || hinted(e.ZoneHints(), node.Zone)
	}
	switch {
	case allNode && forNode:
		return sameNode
	case allZone && forZone:
		return sameZone
	}
	return anyTopology
}

// allows reports whether this node may use e under the hints in force.
func (t topology) allows(e *service.Endpoint, node service.Node) bool {
	switch t {
	case sameNode:
		return hinted(e.NodeHints(), node.Name)
	case sameZone:
		return hinted(e.ZoneHints(), node.Zone)
	}
	return true
}

// hinted reports whether hints name it; a node without a name or a zone is
// never named.
func hinted(hints []string, it string) bool {
	return it != "" && slices.Contains(hints, it)
}

// rows returns every endpoint with what is known of its health, and the times
// at which their health changed.
func (c *computation) rows(p *service.Port, eps []service.Endpoint) ([]Endpoint, []flap) {
	rows := make([]Endpoint, len(eps))
	var probed []Probed
	var flaps []flap
	for i := range eps {
		st := c.in.Health.Of(p, eps[i].Address)
		rows[i] = Endpoint{
			Endpoint: &eps[i], Probed: &unprobed, Local: eps[i].Node != "" && eps[i].Node == c.node.Name,
			Excluded: contains(c.in.Policy.ExcludeCIDRs, eps[i].Address.Addr()),
		}
		if p := (Probed{Health: st.Status.String(), Since: st.Since, Error: st.LastError, Ejected: c.ejected(p, eps[i].Address)}); p != unprobed {
			if probed == nil {
				probed = make([]Probed, len(eps))
			}
			probed[i] = p
			rows[i].Probed = &probed[i]
		}
		for _, t := range st.Flaps {
			flaps = append(flaps, flap{at: t, row: i})
		}
	}
	return rows, flaps
}

var (
	downText = health.Down.String()
	unprobed = Probed{Health: health.Unknown.String()}
)

// ejected says why p's endpoint at an address is ejected; nil if it isn't, or if p wants nothing of health checks.
func (c *computation) ejected(p *service.Port, at netip.AddrPort) *health.Ejection {
	if c.in.Ejected == nil || p.Health.Kind == service.CheckOff {
		return nil
	}
	return c.in.Ejected.Of(health.Endpoint{Protocol: p.Protocol, Address: at})
}

// EndpointAt returns s's endpoint at an address; nil if it has none there.
func (s *Service) EndpointAt(a netip.AddrPort) *Endpoint {
	i, ok := slices.BinarySearchFunc(s.Endpoints, a, func(e Endpoint, a netip.AddrPort) int { return e.Address.Compare(a) })
	if !ok {
		return nil
	}
	return &s.Endpoints[i]
}

// MayBeEjected reports whether passive health may take e out of s: it is used, and s doesn't want to be left alone.
func (s *Service) MayBeEjected(e *Endpoint) bool {
	return s.Port.Health.Kind != service.CheckOff && s.Port.Protocol != service.SCTP && !e.Excluded && (e.Ready || e.Serving)
}

// IsEjected reports whether passive health has taken e out.
func (e *Endpoint) IsEjected() bool { return e.Probed != nil && e.Ejected != nil }

// down reports whether e failed its health check or is ejected. What isn't known is used.
func (e *Endpoint) down() bool {
	return e.Probed != nil && e.Health == downText || e.IsEjected()
}

// Keeps reports whether e keeps the UDP flows it has: one that gets new ones
// does, and one that drains (weight 0, or on its way out), but not one whose
// health check found it down, unless all are and are used nevertheless, nor one
// that has become another proxy's.
func (e *Endpoint) Keeps() bool {
	return !e.Excluded && (e.Serving || e.Ready) && (e.Usable || !e.down())
}

// Leaves reports whether e gets no new connection, and may have got some before:
// it terminates, drains, or isn't ready or up any more. In good health and passed over
// all the same are those for other zones and nodes, the most of a big cluster's.
// Another proxy's endpoints get no connections from kproxy.
func (e *Endpoint) Leaves() bool {
	takes := e.Ready && !e.Terminating && e.Weight > 0 && !e.down()
	return !e.Usable && !e.Excluded && !takes
}

// group makes the backends of the endpoints chosen. Those that are down are
// left out, unless all are; then they are served as if they were up, and the
// sentence returned says so. Endpoints of weight 0 stay in the group for the sake of
// connections they have; they count neither as up nor as down.
func (c *computation) group(s *Service, chosen []int, a *Abilities) ([]Backend, string) {
	if len(chosen) == 0 {
		return nil, ""
	}
	rows, weightless := s.Endpoints, a.weightless(s)
	total, up := 0, 0
	for _, i := range chosen {
		if rows[i].Weight == 0 {
			continue
		}
		total++
		if !rows[i].down() {
			up++
		}
	}
	panicking := total > 0 && up == 0
	out := make([]Backend, 0, len(chosen))
	for _, i := range chosen {
		e := &rows[i]
		if e.down() && !panicking {
			continue
		}
		w := uint32(e.Weight)
		if weightless {
			w = min(w, 1)
		}
		e.Usable = e.Usable || w > 0
		out = append(out, Backend{Address: e.Address, Weight: w, Local: e.Local})
	}
	switch {
	case panicking && total == 1:
		return out, "its only endpoint is down: serving as if it were up"
	case panicking:
		return out, fmt.Sprintf("all %d endpoints are down: serving as if all were up", total)
	}
	return out, ""
}

// takesConnections reports whether a new connection has somewhere to go.
func takesConnections(group []Backend) bool {
	return slices.ContainsFunc(group, func(b Backend) bool { return b.Weight > 0 })
}

// A node may have several pod networks, each with a proxy of its own. Services
// whose endpoints are in an excluded network are left to its proxy, per family
// and as a whole: with all endpoints there, a service port has no frontend in
// that family, so that no rule of kproxy touches its packets. With only some
// there it is served with the others. One without endpoints is nobody else's
// for certain, and is refused like every other.

// others counts the endpoints of s by family, and those that another proxy serves.
func (s *Service) others() (all, theirs [2]int) {
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		f := service.FamilyOf(e.Address.Addr())
		all[f]++
		if e.Excluded {
			theirs[f]++
		}
	}
	return all, theirs
}

// exclude notes the families in which s is left to another proxy.
func (s *Service) exclude() {
	all, theirs := s.others()
	for f, has := range families(s.Port) {
		s.Excluded[f] = has && all[f] > 0 && theirs[f] == all[f]
	}
}

// Left returns the addresses at which another proxy serves s, but for node ports.
func (s *Service) Left() (out []netip.AddrPort) {
	if s.Excluded == [2]bool{} {
		return nil
	}
	eachBinding(s.Port, func(k Kind, at Binding) {
		if s.Excluded[at.Family] && k != NodePort {
			out = append(out, at.Address)
		}
	})
	return out
}

// leave makes s one that is wholly left to another proxy, and returns why.
func (c *computation) leave(s *Service) string {
	s.Kernel = None
	return "left to another proxy: all its endpoints are in " + joined(c.theirNetworks(s, service.IPv4, service.IPv6), netip.Prefix.String)
}

// theirNetworks are the excluded networks that endpoints of s in the given
// families are in.
func (c *computation) theirNetworks(s *Service, fams ...service.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range c.in.Policy.ExcludeCIDRs {
		if slices.ContainsFunc(s.Endpoints, func(e Endpoint) bool {
			return slices.Contains(fams, service.FamilyOf(e.Address.Addr())) && n.Contains(e.Address.Addr())
		}) {
			out = append(out, n)
		}
	}
	return out
}

// leftToOthers says what of s another proxy serves, where kproxy serves the rest.
func (c *computation) leftToOthers(s *Service) []string {
	if len(s.Frontends) == 0 {
		return nil
	}
	var out []string
	all, theirs := s.others()
	for _, f := range service.Families {
		switch networks := joined(c.theirNetworks(s, f), netip.Prefix.String); {
		case s.Excluded[f]:
			out = append(out, fmt.Sprintf("%s is left to another proxy: all its %s endpoints are in %s", familyText(f), familyText(f), networks))
		case theirs[f] > 0:
			out = append(out, fmt.Sprintf("%d of its %d %s endpoints are another proxy's, in %s: it is served with the others only", theirs[f], all[f], familyText(f), networks))
		}
	}
	return out
}
