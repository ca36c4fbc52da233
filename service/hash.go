package service

import (
	"net/netip"
	"time"
)

// hasher is FNV-1a over the fields of a Snapshot, each with its length or a
// count before it, so that no two contents write the same bytes. It is spelled
// out field by field because a Snapshot of 10,000 services is hashed on every
// change: formatting with package fmt took most of Build's time.
type hasher uint64

// The constants of 64-bit FNV-1a, RFC 9923 section 5.
const (
	fnvOffset = 0xcbf29ce484222325
	fnvPrime  = 0x100000001b3
)

func newHasher() hasher { return fnvOffset }

func (h *hasher) sum() uint64 { return uint64(*h) }

func (h *hasher) byte(b byte) { *h = (*h ^ hasher(b)) * fnvPrime }

func (h *hasher) uint(v uint64) {
	for range 8 {
		h.byte(byte(v))
		v >>= 8
	}
}

func (h *hasher) bool(b bool) {
	if b {
		h.byte(1)
	} else {
		h.byte(0)
	}
}

func (h *hasher) string(s string) {
	h.uint(uint64(len(s)))
	for i := range len(s) {
		h.byte(s[i])
	}
}

func (h *hasher) strings(list []string) {
	h.uint(uint64(len(list)))
	for _, s := range list {
		h.string(s)
	}
}

// time hashes the instant, not the location or the monotonic reading.
func (h *hasher) time(t time.Time) {
	h.uint(uint64(t.Unix()))
	h.uint(uint64(t.Nanosecond()))
}

func (h *hasher) addr(a netip.Addr) {
	b := a.As16()
	h.byte(byte(a.BitLen()))
	for _, x := range b {
		h.byte(x)
	}
	h.string(a.Zone())
}

func (h *hasher) addrs(list []netip.Addr) {
	h.uint(uint64(len(list)))
	for _, a := range list {
		h.addr(a)
	}
}

func (h *hasher) prefixes(list []netip.Prefix) {
	h.uint(uint64(len(list)))
	for _, p := range list {
		h.addr(p.Addr())
		h.byte(byte(p.Bits()))
	}
}

func (h *hasher) node(n *Node) {
	h.string(n.Name)
	h.string(n.Zone)
	h.addrs(n.Addresses)
	h.prefixes(n.PodCIDRs)
}

// port hashes every field but Source, which has no effect on how a port is served.
func (h *hasher) port(p *Port) {
	h.string(p.Namespace)
	h.string(p.Name)
	h.string(p.Port)
	h.byte(byte(p.Protocol))
	h.time(p.Created)
	h.uint(uint64(p.Number))
	h.uint(uint64(p.NodePort))
	h.addrs(p.ClusterIPs)
	h.addrs(p.ExternalIPs)
	h.addrs(p.LoadBalancerIPs)
	h.prefixes(p.SourceRanges)
	h.bool(p.ExternallyAccessible)
	h.bool(p.InternalLocal)
	h.bool(p.ExternalLocal)
	h.uint(uint64(p.HealthCheckNodePort))
	h.uint(uint64(p.Affinity))
	h.string(string(p.Algorithm))
	h.bool(p.AlgorithmGiven)
	h.string(p.Scheduler)
	h.string(string(p.Prefer))
	h.string(string(p.Health.Kind))
	h.string(p.Health.Path)
	h.uint(uint64(p.Health.Port))
	h.uint(uint64(p.Health.Interval))
	h.uint(uint64(p.Health.Timeout))
	h.uint(uint64(p.Health.Rise))
	h.uint(uint64(p.Health.Fall))
	h.byte(byte(p.ProxyProtocol))
	h.uint(uint64(p.ConnectTimeout))
	h.uint(uint64(p.Retries))
	h.uint(uint64(p.IdleTimeout))
	h.strings(p.Problems)
}

func (h *hasher) endpoints(eps []Endpoint) {
	h.uint(uint64(len(eps)))
	for i := range eps {
		h.endpoint(&eps[i])
	}
}

func (h *hasher) endpoint(e *Endpoint) {
	h.addr(e.Address.Addr())
	h.uint(uint64(e.Address.Port()))
	h.string(e.Node)
	h.string(e.Zone)
	h.bool(e.Ready)
	h.bool(e.Serving)
	h.bool(e.Terminating)
	h.strings(e.ZoneHints())
	h.strings(e.NodeHints())
	h.uint(uint64(e.Weight))
}

func newEntry(p *Port, eps []Endpoint) entry {
	h := newHasher()
	h.port(p)
	h.endpoints(eps)
	content := h.sum()
	h.string(p.Source)
	return entry{p, eps, hashes{content, h.sum()}}
}

func hashPort(p *Port) uint64 {
	h := newHasher()
	h.port(p)
	return h.sum()
}

func hashEndpoints(eps []Endpoint) uint64 {
	h := newHasher()
	h.endpoints(eps)
	return h.sum()
}

// mixed spreads a hash over all its bits, so that sums of several say as much as
// the hashes do (the finalizer of SplitMix64: Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014).
func mixed(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
