package service

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Snapshot is everything the sources want at one moment: service ports in key
// order, each with its endpoints in address order, this node, and the networks of cluster IPs. It is
// immutable and safe for concurrent use. The zero value is an empty Snapshot.
type Snapshot struct {
	node    Node
	entries []entry
	cidrs   []netip.Prefix
	sum     uint64 // of the mixed hashes of entries
	hash    uint64 // of everything but where ports were read
}

type entry struct {
	port      *Port
	endpoints []Endpoint
	hash      uint64 // of both, but for where they were read
}

// Node returns this node.
func (s *Snapshot) Node() Node { return s.node }

// ServiceCIDRs returns the networks that the cluster takes its cluster IPs from, as far as the sources say. They may
// overlap, and may not be modified.
func (s *Snapshot) ServiceCIDRs() []netip.Prefix { return s.cidrs }

// Len returns the number of service ports.
func (s *Snapshot) Len() int { return len(s.entries) }

// Hash identifies the content: equal content, equal hash, in this process and
// in any other of the same version.
func (s *Snapshot) Hash() uint64 { return s.hash }

// All iterates over the service ports in key order with their endpoints.
// Neither may be modified.
func (s *Snapshot) All() iter.Seq2[*Port, []Endpoint] {
	return func(yield func(*Port, []Endpoint) bool) {
		for i := range s.entries {
			if !yield(s.entries[i].port, s.entries[i].endpoints) {
				return
			}
		}
	}
}

// At returns the i-th service port in key order, its endpoints, and a hash of
// both, 0 <= i < Len.
func (s *Snapshot) At(i int) (*Port, []Endpoint, uint64) {
	e := &s.entries[i]
	return e.port, e.endpoints, e.hash
}

// Find returns the index of the service port named k, and whether there is one.
func (s *Snapshot) Find(k Key) (int, bool) {
	return find(s.entries, k)
}

func find(list []entry, k Key) (int, bool) {
	return slices.BinarySearchFunc(list, k, func(e entry, k Key) int { return e.port.Key.Compare(k) })
}

// Get returns the service port named k and its endpoints.
func (s *Snapshot) Get(k Key) (*Port, []Endpoint, bool) {
	i, ok := s.Find(k)
	if !ok {
		return nil, nil, false
	}
	return s.entries[i].port, s.entries[i].endpoints, true
}

// Builder collects ports and endpoints in any order. The zero value is ready
// to use. It is not safe for concurrent use.
type Builder struct {
	node      Node
	cidrs     []netip.Prefix
	ports     map[Key]*Port
	endpoints map[Key][]Endpoint
}

// SetNode names the node the Snapshot is for.
func (b *Builder) SetNode(n Node) { b.node = n }

// AddServiceCIDRs adds networks that the cluster takes its cluster IPs from.
func (b *Builder) AddServiceCIDRs(networks ...netip.Prefix) { b.cidrs = append(b.cidrs, networks...) }

// AddPort adds a service port. A second port with the same key is refused: the
// caller knows both places and says which one is in force.
func (b *Builder) AddPort(p Port) error {
	if _, dup := b.ports[p.Key]; dup {
		return fmt.Errorf("service port %s %s is defined twice", p.Key, p.Protocol)
	}
	if b.ports == nil {
		b.ports = map[Key]*Port{}
	}
	p.ClusterIPs = sorted(p.ClusterIPs, netip.Addr.Compare)
	p.ExternalIPs = sorted(p.ExternalIPs, netip.Addr.Compare)
	p.LoadBalancerIPs = sorted(p.LoadBalancerIPs, netip.Addr.Compare)
	p.SourceRanges = sorted(p.SourceRanges, netip.Prefix.Compare)
	p.Problems = slices.Clone(p.Problems)
	p.Algorithm = cmp.Or(p.Algorithm, RoundRobin)
	p.Prefer = cmp.Or(p.Prefer, PreferAuto)
	b.ports[p.Key] = &p
	return nil
}

// AddEndpoint adds an endpoint of the port named k; the port may come later.
// Where slices overlap and name an address twice, the one that isn't
// terminating wins, as in kube-proxy.
func (b *Builder) AddEndpoint(k Key, e Endpoint) {
	if b.endpoints == nil {
		b.endpoints = map[Key][]Endpoint{}
	}
	if h := e.Hints; h != nil {
		e.Hints = &Hints{Zones: sorted(h.Zones, strings.Compare), Nodes: sorted(h.Nodes, strings.Compare)}
	}
	b.endpoints[k] = append(b.endpoints[k], e)
}

// Build returns the Snapshot of what was added. Endpoints of a port that
// was not added are left out. The Builder may be used on; earlier Snapshots
// don't change.
func (b *Builder) Build() *Snapshot {
	s := &Snapshot{node: b.node, entries: make([]entry, 0, len(b.ports))}
	s.node.Addresses = sorted(b.node.Addresses, netip.Addr.Compare)
	s.node.PodCIDRs = sorted(b.node.PodCIDRs, netip.Prefix.Compare)
	s.cidrs = sorted(b.cidrs, netip.Prefix.Compare)
	for k, p := range b.ports {
		eps := dedupe(b.endpoints[k])
		s.entries = append(s.entries, newEntry(p, eps))
	}
	slices.SortFunc(s.entries, func(a, b entry) int { return a.port.Key.Compare(b.port.Key) })
	s.count(s.entries, 1)
	s.rehash()
	return s
}

// count adds the hashes of list to the sum n times. A sum knows no order, and needs
// none: an entry's hash covers its key, and the order is that of the keys. So a
// Snapshot that differs from another in one entry is hashed by reading that one.
func (s *Snapshot) count(list []entry, n int) {
	for i := range list {
		s.sum += uint64(n) * Mix(list[i].hash)
	}
}

// rehash sets the hash of the whole from those of the node, the networks and the entries.
func (s *Snapshot) rehash() {
	h := NewHasher()
	h.node(&s.node)
	h.Prefixes(s.cidrs)
	h.Uint(uint64(len(s.entries)))
	h.Uint(s.sum)
	s.hash = uint64(h)
}

// dedupe sorts by address and keeps, of equal addresses, the best.
func dedupe(in []Endpoint) []Endpoint {
	eps := slices.Clone(in)
	slices.SortFunc(eps, compareEndpoint)
	return slices.CompactFunc(eps, func(a, b Endpoint) bool { return a.Address == b.Address })
}

// compareEndpoint orders by address, and endpoints of one address best first:
// not terminating, ready, serving. It goes on to every other field, so that
// the order in which endpoints were added never shows.
func compareEndpoint(a, b Endpoint) int {
	return cmp.Or(
		a.Address.Compare(b.Address),
		compareBool(a.Terminating, b.Terminating),
		compareBool(b.Ready, a.Ready),
		compareBool(b.Serving, a.Serving),
		cmp.Compare(b.Weight, a.Weight),
		strings.Compare(a.Node, b.Node),
		slices.Compare(a.ZoneHints(), b.ZoneHints()),
		slices.Compare(a.NodeHints(), b.NodeHints()),
	)
}

// sorted returns a copy of in, in order and without duplicates.
func sorted[T comparable](in []T, compare func(a, b T) int) []T {
	out := slices.Clone(in)
	slices.SortFunc(out, compare)
	return slices.Compact(out)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
