package userspace

import (
	"hash/maphash"
	"maps"
	"net/netip"
	"sync/atomic"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// table is what connections are looked up in: the frontends of all services,
// by where clients connect to. It is read without a lock; the Server's lock
// orders changes.
type table struct {
	fronts *index[frontKey, front]
	addrs  *index[netip.Addr, int] // service addresses: how many fronts each has
	policy atomic.Pointer[plan.Policy]
}

// frontKey is a service address; for a node port its address is the zero Addr,
// and the family tells which.
type frontKey struct {
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
	return &table{fronts: newIndex[frontKey, front](), addrs: newIndex[netip.Addr, int]()}
}

func frontKeyOf(f *plan.Frontend) frontKey {
	if f.Kind == plan.NodePort {
		return frontKey{netip.AddrPortFrom(netip.Addr{}, f.Address.Port()), f.Protocol, f.Family}
	}
	return frontKey{f.Address, f.Protocol, f.Family}
}

// lookup finds the frontend a connection to orig was headed to. Node ports are
// looked up last, as in the kernel, and only on addresses that they answer on;
// local reports whether an address is this node's own.
func (t *table) lookup(proto service.Protocol, orig netip.AddrPort, local func(netip.Addr) bool) (front, bool) {
	family := service.FamilyOf(orig.Addr())
	if f, ok := t.fronts.get(frontKey{orig, proto, family}); ok {
		return f, true
	}
	f, ok := t.fronts.get(frontKey{netip.AddrPortFrom(netip.Addr{}, orig.Port()), proto, family})
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
		k := frontKeyOf(f)
		if _, ok := t.fronts.get(k); !ok {
			t.count(k, 1)
		}
		t.fronts.set(k, front{f, v})
	}
}

// drop takes away the frontends that are still v's.
func (t *table) drop(v *view) {
	for i := range v.plan.Frontends {
		k := frontKeyOf(&v.plan.Frontends[i])
		if f, ok := t.fronts.get(k); ok && f.view == v {
			t.fronts.delete(k)
			t.count(k, -1)
		}
	}
}

// count keeps addrs in step with fronts.
func (t *table) count(k frontKey, by int) {
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

// indexShards is so many that a shard stays small in a cluster with tens of
// thousands of services: a change copies one shard.
const indexShards = 1024

// index is a map that is read without a lock. Writers copy the shard they
// change; there is one at a time. A reader of one key sees it before or after
// a change.
type index[K comparable, V any] struct {
	seed   maphash.Seed
	shards [indexShards]atomic.Pointer[map[K]V]
}

func newIndex[K comparable, V any]() *index[K, V] { return &index[K, V]{seed: maphash.MakeSeed()} }

func (x *index[K, V]) shard(k K) *atomic.Pointer[map[K]V] {
	return &x.shards[maphash.Comparable(x.seed, k)%indexShards]
}

func (x *index[K, V]) get(k K) (v V, ok bool) {
	if m := x.shard(k).Load(); m != nil {
		v, ok = (*m)[k]
	}
	return v, ok
}

func (x *index[K, V]) set(k K, v V) {
	x.change(k, func(m map[K]V) { m[k] = v })
}

func (x *index[K, V]) delete(k K) {
	x.change(k, func(m map[K]V) { delete(m, k) })
}

func (x *index[K, V]) change(k K, f func(map[K]V)) {
	s := x.shard(k)
	m := map[K]V{}
	if old := s.Load(); old != nil {
		m = maps.Clone(*old)
	}
	f(m)
	s.Store(&m)
}
