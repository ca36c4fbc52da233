package userspace

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// table holds the frontends of all services, by where clients connect to. Connections
// are looked up in it.
type table struct {
	mu     sync.RWMutex // guards fronts and addrs
	fronts map[plan.Binding]front
	addrs  map[netip.Addr]int // service addresses: how many fronts each has
	policy atomic.Pointer[plan.Policy]
	ruled  atomic.Pointer[plan.Policy] // whose rules the kernel has; nil for none
}

// front is a frontend and the service it belongs to.
type front struct {
	*plan.Frontend
	view *view
}

func newTable() *table { return &table{fronts: map[plan.Binding]front{}, addrs: map[netip.Addr]int{}} }

// lookup finds the frontend a connection to orig was headed to. Node ports are
// looked up last, as in the kernel, and only on addresses that they answer on;
// local reports whether an address is this node's own.
func (t *table) lookup(proto service.Protocol, orig netip.AddrPort, local func(netip.Addr) bool) (front, bool) {
	at := plan.Binding{Family: service.FamilyOf(orig.Addr()), Protocol: proto, Address: orig}
	t.mu.RLock()
	f, ok := t.fronts[at]
	at.Address = netip.AddrPortFrom(netip.Addr{}, orig.Port())
	nodePort, may := t.fronts[at]
	t.mu.RUnlock()
	if !ok && may && local(orig.Addr()) && t.rules().AnswersNodePorts(orig.Addr()) {
		return nodePort, true
	}
	return f, ok
}

// rules returns the policy of the last plan.
func (t *table) rules() *plan.Policy {
	if p := t.policy.Load(); p != nil {
		return p
	}
	return &plan.Policy{}
}

// set makes v answer at each of its frontends.
func (t *table) set(v *view) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range v.plan.Frontends {
		f := &v.plan.Frontends[i]
		k := f.Binding()
		if _, ok := t.fronts[k]; !ok {
			t.addrs[k.Address.Addr()]++
		}
		t.fronts[k] = front{f, v}
	}
}

// drop takes away the frontends that are still v's.
func (t *table) drop(v *view) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range v.plan.Frontends {
		k := v.plan.Frontends[i].Binding()
		if t.fronts[k].view != v {
			continue
		}
		delete(t.fronts, k)
		if t.addrs[k.Address.Addr()]--; t.addrs[k.Address.Addr()] == 0 {
			delete(t.addrs, k.Address.Addr())
		}
	}
}

// source returns the address that the endpoint at backend is to see for c. An
// address that means nothing outside this node is never kept: loopback,
// link-local, and a service's own address, which is what the node connects
// from where service addresses are on an interface of it (mode ipvs).
func (t *table) source(f front, c plan.Client, backend netip.Addr) source {
	p := t.rules()
	addr := p.SocketAddress(c, backend)
	if ruled := t.ruled.Load(); addr != c.Address && (ruled == nil || ruled.SocketAddress(c, backend) != addr) {
		return source{} // no rule would give the packets the client's address
	}
	if !addr.IsValid() || f.Masquerades(c, backend, p) || c.Address.IsLoopback() || c.Address.IsLinkLocalUnicast() {
		return source{}
	}
	if c.Node {
		t.mu.RLock()
		own := t.addrs[c.Address] > 0
		t.mu.RUnlock()
		if own {
			return source{}
		}
	}
	return source{addr, !c.Node}
}
