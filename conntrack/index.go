package conntrack

import (
	"net/netip"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// front is a frontend with the service it belongs to.
type front struct {
	service  *plan.Service
	frontend *plan.Frontend
}

// index finds the frontend a flow was sent to.
type index struct {
	fronts map[plan.Binding]front
	local  func(netip.Addr) bool
}

// newIndex indexes the frontends of one protocol. local reports whether an
// address is one of this node's: only there are node ports, if p lets them be.
func newIndex(p *plan.Plan, protocol service.Protocol, local func(netip.Addr) bool) *index {
	x := &index{fronts: map[plan.Binding]front{}, local: local}
	if p == nil {
		return x
	}
	x.local = func(a netip.Addr) bool { return local(a) && p.Policy.AnswersNodePorts(a) }
	for _, s := range p.Services {
		if s.Port.Protocol == protocol {
			x.add(s)
		}
	}
	return x
}

func (x *index) add(s *plan.Service) {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		x.fronts[f.Binding()] = front{s, f}
	}
}

// remove removes s, which was added.
func (x *index) remove(s *plan.Service) {
	for i := range s.Frontends {
		delete(x.fronts, s.Frontends[i].Binding())
	}
}

// find returns the frontend to which f was sent. An entry in a
// zone is another program's, whatever its addresses say.
func (x *index) find(f *Flow) (front, bool) {
	if f.Zone != 0 {
		return front{}, false
	}
	at := plan.Binding{Family: f.Family, Protocol: f.Protocol, Address: f.OrigDst}
	if hit, ok := x.fronts[at]; ok {
		return hit, true
	}
	at.Address = netip.AddrPortFrom(netip.Addr{}, f.OrigDst.Port())
	hit, ok := x.fronts[at]
	if !ok || !x.local(f.OrigDst.Addr()) {
		return front{}, false
	}
	return hit, true
}
