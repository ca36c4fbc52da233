package plan

import (
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// digest is FNV-1a with 64 bits: the same for the same content in every
// process, and without allocation.
type digest uint64

const (
	fnvOffset digest = 14695981039346656037
	fnvPrime  digest = 1099511628211
)

func (d *digest) byte(b byte) { *d = (*d ^ digest(b)) * fnvPrime }

func (d *digest) bool(b bool) {
	if b {
		d.byte(1)
	} else {
		d.byte(0)
	}
}

func (d *digest) uint(v uint64) {
	for range 8 {
		d.byte(byte(v))
		v >>= 8
	}
}

func (d *digest) string(s string) {
	d.uint(uint64(len(s)))
	for i := range len(s) {
		d.byte(s[i])
	}
}

func (d *digest) addr(a netip.Addr) {
	d.byte(byte(a.BitLen()))
	b := a.As16()
	for _, x := range b {
		d.byte(x)
	}
}

func (d *digest) addrPort(a netip.AddrPort) {
	d.addr(a.Addr())
	d.byte(byte(a.Port()))
	d.byte(byte(a.Port() >> 8))
}

func (d *digest) prefixes(ps []netip.Prefix) {
	d.uint(uint64(len(ps)))
	for _, p := range ps {
		d.addr(p.Addr())
		d.byte(byte(p.Bits()))
	}
}

// kernelHash covers everything the rules of s.Beneath depend on, and nothing
// else: no health but in who is usable, no times, no data plane. It is 0 only
// where nothing lies beneath.
func kernelHash(s *Service, p *Policy, a *Abilities) uint64 {
	if s.Beneath == None {
		return 0
	}
	d := fnvOffset
	d.string(string(s.Beneath))
	d.string(s.Port.Namespace)
	d.string(s.Port.Name)
	d.string(s.Port.Port)
	d.byte(byte(s.Port.Protocol))
	d.string(string(s.Port.Algorithm))
	d.uint(uint64(s.Port.Affinity))
	d.bool(p.MasqueradeAll)
	d.prefixes(p.PodCIDRs)
	d.string(p.PodBridge)
	d.string(p.PodInterfacePrefix)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if !s.Serves(f) && !a.Drains {
			continue
		}
		d.string(string(f.Kind))
		d.byte(byte(f.Family))
		d.byte(byte(f.Protocol))
		d.addrPort(f.Address)
		d.string(string(f.Verdict))
		d.bool(f.Local)
		d.bool(f.ShortCircuit)
		d.string(string(f.Masquerade))
		d.prefixes(f.SourceRanges)
	}
	for i := range s.Groups {
		d.group(s.Groups[i].Cluster)
		d.group(s.Groups[i].Local)
	}
	d.string(s.Scheduler)
	if a.Drains {
		d.endpoints(s)
	}
	if a.LocalAddresses {
		d.localAddresses(s, p)
	}
	return max(uint64(d), 1)
}

// endpoints covers every listed endpoint: one that isn't usable drains.
func (d *digest) endpoints(s *Service) {
	d.uint(uint64(len(s.Endpoints)))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		d.addrPort(e.Address)
		d.bool(e.Local)
		d.bool(e.Excluded)
		d.bool(s.Port.Protocol == service.UDP && e.Keeps())
	}
}

// localAddresses covers the node's addresses that node ports answer on, and which
// service addresses are the node's own, and so not on kproxy's link.
func (d *digest) localAddresses(s *Service, p *Policy) {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Kind != NodePort {
			d.bool(p.ownAddress(f.Address.Addr()))
			continue
		}
		for _, a := range p.NodePortAddresses(f.Family) {
			d.addr(a)
		}
		d.byte(0) // the end of the list: no address begins with it
	}
}

func (d *digest) group(g []Backend) {
	d.uint(uint64(len(g)))
	for i := range g {
		d.addrPort(g[i].Address)
		d.uint(uint64(g[i].Weight))
		d.bool(g[i].Local)
	}
}

// steadyHash covers what must not change for a service to be steady: who its
// endpoints are, which of them may be used, and which are down. A first
// verdict "up" isn't a change: the endpoint was used before it.
func steadyHash(s *Service) uint64 {
	d := fnvOffset
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		d.addrPort(e.Address)
		d.bool(e.Ready)
		d.bool(e.Serving)
		d.bool(e.Terminating)
		d.bool(e.down())
		d.bool(e.Usable)
	}
	return uint64(d)
}
