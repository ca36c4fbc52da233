package userspace

import (
	"net/netip"
	"sync/atomic"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// table is what connections are looked up in: the frontends of all services,
// by where clients connect to. It is read without a lock; the Server's lock
// orders those who change it.
type table struct {
	fronts *index[portal, front]
	addrs  *index[netip.Addr, int] // service addresses: how many fronts each has
	policy atomic.Pointer[plan.Policy]
}

// portal is a service address; for a node port its address is the zero Addr,
// and the family tells which.
type portal struct {
	addr   netip.AddrPort
	proto  service.Protocol
	family service.Family
}

// front is a frontend and the service it belongs to.
type front struct {
	*plan.Frontend
	view *view
}

func newTable() *table {
	return &table{fronts: newIndex[portal, front](), addrs: newIndex[netip.Addr, int]()}
}

func portalOf(f *plan.Frontend) portal {
	if f.Kind == plan.NodePort {
		return portal{netip.AddrPortFrom(netip.Addr{}, f.Address.Port()), f.Protocol, f.Family}
	}
	return portal{f.Address, f.Protocol, f.Family}
}

// lookup finds the frontend a connection to orig was headed to. Node ports are
// looked up last, as in the kernel, and only on addresses that they answer on;
// local reports whether an address is this node's own.
func (t *table) lookup(proto service.Protocol, orig netip.AddrPort, local func(netip.Addr) bool) (front, bool) {
	family := service.FamilyOf(orig.Addr())
	if f, ok := t.fronts.get(portal{orig, proto, family}); ok {
		return f, true
	}
	f, ok := t.fronts.get(portal{netip.AddrPortFrom(netip.Addr{}, orig.Port()), proto, family})
	if !ok || !local(orig.Addr()) || !t.rules().AnswersNodePorts(orig.Addr()) {
		return front{}, false
	}
	return f, true
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
	for i := range v.plan.Frontends {
		f := &v.plan.Frontends[i]
		k := portalOf(f)
		if _, ok := t.fronts.get(k); !ok {
			t.count(k, 1)
		}
		t.fronts.set(k, front{f, v})
	}
}

// drop takes away the frontends that are still v's.
func (t *table) drop(v *view) {
	for i := range v.plan.Frontends {
		k := portalOf(&v.plan.Frontends[i])
		if f, ok := t.fronts.get(k); ok && f.view == v {
			t.fronts.delete(k)
			t.count(k, -1)
		}
	}
}

// count keeps addrs in step with fronts.
func (t *table) count(k portal, by int) {
	a := k.addr.Addr()
	if !a.IsValid() {
		return
	}
	n, _ := t.addrs.get(a)
	if n+by == 0 {
		t.addrs.delete(a)
		return
	}
	t.addrs.set(a, n+by)
}

// source returns the address that the endpoint at backend is to see for c. An
// address that means nothing outside this node is never kept: loopback,
// link-local, and a service's own address, which is what the node connects
// from where service addresses are on an interface of it (mode ipvs).
func (t *table) source(f front, c plan.Client, backend netip.Addr) source {
	p := t.rules()
	if f.Masquerades(c, backend, p) || p.MasqueradesSocket(c, backend) || c.Address.IsLoopback() || c.Address.IsLinkLocalUnicast() {
		return source{}
	}
	if _, own := t.addrs.get(c.Address); own && c.Node {
		return source{}
	}
	return source{addr: c.Address, transparent: !c.Node}
}
