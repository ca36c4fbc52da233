package service

import (
	"net/netip"
	"time"
)

// Hasher is 64-bit FNV-1a over fields, each list and string with its length before it,
// so that no two contents write the same bytes. It gives the same for the same in every
// process, and allocates nothing. Fields are spelled out one by one because 10,000
// services are hashed at a time: formatting with package fmt took most of that.
type Hasher uint64

// The constants of 64-bit FNV-1a, RFC 9923 section 5.
const (
	fnvOffset = 0xcbf29ce484222325
	fnvPrime  = 0x100000001b3
)

// NewHasher returns the Hasher of nothing.
func NewHasher() Hasher { return fnvOffset }

// Byte adds a byte.
func (h *Hasher) Byte(b byte) { *h = (*h ^ Hasher(b)) * fnvPrime }

// Uint adds a number.
func (h *Hasher) Uint(v uint64) {
	for range 8 {
		h.Byte(byte(v))
		v >>= 8
	}
}

// Bool adds a truth value.
func (h *Hasher) Bool(b bool) {
	if b {
		h.Byte(1)
	} else {
		h.Byte(0)
	}
}

// String adds a text.
func (h *Hasher) String(s string) {
	h.Uint(uint64(len(s)))
	for i := range len(s) {
		h.Byte(s[i])
	}
}

func (h *Hasher) strings(list []string) {
	h.Uint(uint64(len(list)))
	for _, s := range list {
		h.String(s)
	}
}

// time hashes the instant, not the location or the monotonic reading.
func (h *Hasher) time(t time.Time) {
	h.Uint(uint64(t.Unix()))
	h.Uint(uint64(t.Nanosecond()))
}

// Addr adds an address.
func (h *Hasher) Addr(a netip.Addr) {
	b := a.As16()
	h.Byte(byte(a.BitLen()))
	for _, x := range b {
		h.Byte(x)
	}
}

// AddrPort adds an address with its port.
func (h *Hasher) AddrPort(a netip.AddrPort) {
	h.Addr(a.Addr())
	h.Uint(uint64(a.Port()))
}

func (h *Hasher) addrs(list []netip.Addr) {
	h.Uint(uint64(len(list)))
	for _, a := range list {
		h.Addr(a)
	}
}

// Prefixes adds networks in their order.
func (h *Hasher) Prefixes(list []netip.Prefix) {
	h.Uint(uint64(len(list)))
	for _, p := range list {
		h.Addr(p.Addr())
		h.Byte(byte(p.Bits()))
	}
}

func (h *Hasher) node(n *Node) {
	h.String(n.Name)
	h.String(n.Zone)
	h.addrs(n.Addresses)
	h.Prefixes(n.PodCIDRs)
}

// port hashes every field but Source, which has no effect on how a port is served.
func (h *Hasher) port(p *Port) {
	h.String(p.Namespace)
	h.String(p.Name)
	h.String(p.Port)
	h.Byte(byte(p.Protocol))
	h.time(p.Created)
	h.Uint(uint64(p.Number))
	h.Uint(uint64(p.NodePort))
	h.addrs(p.ClusterIPs)
	h.addrs(p.ExternalIPs)
	h.addrs(p.LoadBalancerIPs)
	h.Prefixes(p.SourceRanges)
	h.Bool(p.ExternallyAccessible)
	h.Bool(p.InternalLocal)
	h.Bool(p.ExternalLocal)
	h.Uint(uint64(p.HealthCheckNodePort))
	h.Uint(uint64(p.Affinity))
	h.String(string(p.Algorithm))
	h.Bool(p.AlgorithmGiven)
	h.String(p.Scheduler)
	h.String(string(p.Prefer))
	h.String(string(p.Health.Kind))
	h.String(p.Health.Path)
	h.Uint(uint64(p.Health.Port))
	h.Uint(uint64(p.Health.Interval))
	h.Uint(uint64(p.Health.Timeout))
	h.Uint(uint64(p.Health.Rise))
	h.Uint(uint64(p.Health.Fall))
	h.Byte(byte(p.ProxyProtocol))
	h.Uint(uint64(p.ConnectTimeout))
	h.Uint(uint64(p.Retries))
	h.Uint(uint64(p.IdleTimeout))
	h.Uint(uint64(p.Responses))
	h.strings(p.Problems)
}

func (h *Hasher) endpoints(eps []Endpoint) {
	h.Uint(uint64(len(eps)))
	for i := range eps {
		h.endpoint(&eps[i])
	}
}

func (h *Hasher) endpoint(e *Endpoint) {
	h.AddrPort(e.Address)
	h.String(e.Node)
	h.Bool(e.Ready)
	h.Bool(e.Serving)
	h.Bool(e.Terminating)
	h.strings(e.ZoneHints())
	h.strings(e.NodeHints())
	h.Uint(uint64(e.Weight))
}

func newEntry(p *Port, eps []Endpoint) entry {
	h := NewHasher()
	h.port(p)
	h.endpoints(eps)
	return entry{p, eps, uint64(h)}
}

func hashPort(p *Port) uint64 {
	h := NewHasher()
	h.port(p)
	return uint64(h)
}

func hashEndpoints(eps []Endpoint) uint64 {
	h := NewHasher()
	h.endpoints(eps)
	return uint64(h)
}

// Mix spreads a hash over all its bits, so that sums of several say as much as the hashes do: a bijection in
// which every input bit affects every output bit, the finalizer of SplitMix64 (Steele, Lea and Flood: Fast
// splittable pseudorandom number generators, OOPSLA 2014).
func Mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
