package plan

import "kproxy.dev/kproxy/service"

// digest is of what services are made of.
type digest struct{ service.Hasher }

// kernelHash covers everything the rules of s.Kernel depend on, and nothing
// else: no health but in who is usable, no times, no data plane. It is 0 only
// without a kernel data plane.
func kernelHash(s *Service, p *Policy, a *Abilities) uint64 {
	if s.Kernel == None {
		return 0
	}
	d := digest{service.NewHasher()}
	d.String(string(s.Kernel))
	d.String(s.Port.Namespace)
	d.String(s.Port.Name)
	d.String(s.Port.Port)
	d.Byte(byte(s.Port.Protocol))
	d.String(string(s.Port.Algorithm))
	d.Bool(s.Port.AlgorithmGiven)
	d.Uint(uint64(s.Port.Affinity))
	d.Bool(p.MasqueradeAll)
	d.Prefixes(p.PodCIDRs)
	d.String(p.PodBridge)
	d.String(p.PodInterfacePrefix)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if !s.Serves(f) && !a.Drains {
			continue
		}
		d.String(string(f.Kind))
		d.Byte(byte(f.Family))
		d.Byte(byte(f.Protocol))
		d.AddrPort(f.Address)
		d.String(string(f.Verdict))
		d.Bool(f.Local)
		d.Bool(f.ShortCircuit)
		d.String(string(f.Masquerade))
		d.Prefixes(f.SourceRanges)
	}
	for i := range s.Groups {
		d.group(s.Groups[i].Cluster)
		d.group(s.Groups[i].Local)
	}
	d.String(s.Scheduler)
	if a.Drains {
		d.endpoints(s)
	}
	if a.LocalAddresses {
		d.localAddresses(s, p)
	}
	return max(uint64(d.Hasher), 1)
}

// endpoints covers every listed endpoint: one that isn't usable drains.
func (d *digest) endpoints(s *Service) {
	d.Uint(uint64(len(s.Endpoints)))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		d.AddrPort(e.Address)
		d.Bool(e.Local)
		d.Bool(e.Excluded)
		d.Bool(s.Port.Protocol == service.UDP && e.Keeps())
	}
}

// localAddresses covers the node's addresses that node ports answer on, and which
// service addresses are the node's own, and so not on kproxy's link.
func (d *digest) localAddresses(s *Service, p *Policy) {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Kind != NodePort {
			d.Bool(p.ownAddress(f.Address.Addr()))
			continue
		}
		for _, a := range p.NodePortAddresses(f.Family) {
			d.Addr(a)
		}
		d.Byte(0) // the end of the list: no address begins with it
	}
}

func (d *digest) group(g []Backend) {
	d.Uint(uint64(len(g)))
	for i := range g {
		d.AddrPort(g[i].Address)
		d.Uint(uint64(g[i].Weight))
		d.Bool(g[i].Local)
	}
}

// steadyHash covers what must not change for a service to be steady: who its
// endpoints are, which of them may be used, and which are down. A first
// verdict "up" isn't a change: the endpoint was used before it.
func steadyHash(s *Service) uint64 {
	d := digest{service.NewHasher()}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		d.AddrPort(e.Address)
		d.Bool(e.Ready)
		d.Bool(e.Serving)
		d.Bool(e.Terminating)
		d.Bool(e.down())
		d.Bool(e.Usable)
	}
	return uint64(d.Hasher)
}
