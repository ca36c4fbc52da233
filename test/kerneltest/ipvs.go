package kerneltest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
)

// modelTable is the [ipvs.Table] of a Host. It refuses what the kernel refuses
// (ip_vs_genl_set_cmd, ip_vs_add_service and ip_vs_add_dest in
// net/netfilter/ipvs/ip_vs_ctl.c).
type modelTable struct{ host *Host }

// Table returns the host's virtual servers.
func (h *Host) Table() ipvs.Table { return modelTable{h} }

// server identifies a virtual server.
type server struct {
	protocol service.Protocol
	address  netip.AddrPort
}

type modelVirtual struct {
	kernel.Virtual // without Reals
	reals          map[netip.AddrPort]*modelReal
	foreign        bool
}

type modelReal struct {
	weight      uint32
	connections int
	foreign     bool
}

// defaultSchedulers are those of Debian's kernel.
var defaultSchedulers = []string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "sh", "mh", "dh", "sed", "nq", "twos"}

// LackScheduler makes the host one without a scheduler.
func (h *Host) LackScheduler(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.schedulers = slices.DeleteFunc(slices.Clone(h.schedulers), func(s string) bool { return s == name })
}

func (m modelTable) List(of ...kernel.Virtual) ([]ipvs.Server, error) {
	m.host.mu.Lock()
	defer m.host.mu.Unlock()
	var out []ipvs.Server
	for _, k := range m.host.servers() {
		v := m.host.virtuals[k]
		if len(of) > 0 && !slices.ContainsFunc(of, func(o kernel.Virtual) bool { return kernel.CompareVirtuals(o, v.Virtual) == 0 }) {
			continue
		}
		s := ipvs.Server{Virtual: v.Virtual}
		for _, a := range v.order() {
			s.Reals = append(s.Reals, kernel.Real{Address: a, Weight: v.reals[a].weight})
			s.Connections = append(s.Connections, v.reals[a].connections)
		}
		out = append(out, s)
	}
	return out, nil
}

func (m modelTable) Change(requests ...ipvs.Request) []error {
	m.host.mu.Lock()
	defer m.host.mu.Unlock()
	errs := make([]error, len(requests))
	for i, r := range requests {
		if r.Real.Address.IsValid() {
			errs[i] = m.host.changeReal(r, false)
		} else {
			errs[i] = m.host.changeVirtual(r, false)
		}
	}
	return errs
}

func (h *Host) changeVirtual(r ipvs.Request, foreign bool) error {
	k := server{r.Virtual.Protocol, r.Virtual.Address}
	m := h.virtuals[k]
	switch {
	case r.Do == ipvs.Add && m != nil:
		return ipvs.ErrExists
	case r.Do != ipvs.Add && m == nil:
		return kernel.ErrNotFound
	case r.Do == ipvs.Delete:
		for _, a := range m.order() {
			h.cutOff(m, a, "whose virtual server was deleted")
		}
		delete(h.virtuals, k)
		return nil
	case !k.address.IsValid() || k.address.Port() == 0:
		return unix.EINVAL
	case !slices.Contains(h.schedulers, r.Virtual.Scheduler):
		return fmt.Errorf("%w: %s", ipvs.ErrScheduler, r.Virtual.Scheduler)
	case m == nil:
		m = &modelVirtual{reals: map[netip.AddrPort]*modelReal{}, foreign: foreign}
		h.virtuals[k] = m
	}
	m.Virtual = r.Virtual
	m.Reals, m.Owner = nil, service.Key{}
	return nil
}

// changeReal changes a real server. The connections of one that is deleted are as good as broken.
func (h *Host) changeReal(r ipvs.Request, foreign bool) error {
	m := h.virtuals[server{r.Virtual.Protocol, r.Virtual.Address}]
	if m == nil {
		return kernel.ErrNotFound
	}
	a := r.Real.Address
	known := m.reals[a]
	switch {
	case r.Do == ipvs.Add && service.FamilyOf(a.Addr()) != service.FamilyOf(m.Address.Addr()):
		return unix.EINVAL // only tunnels lead to the other family
	case r.Do == ipvs.Add && known != nil:
		return ipvs.ErrExists
	case r.Do == ipvs.Add:
		m.reals[a] = &modelReal{weight: r.Real.Weight, foreign: foreign}
		return nil
	case known == nil:
		return kernel.ErrNotFound
	}
	if r.Do == ipvs.Edit {
		known.weight = r.Real.Weight
		return nil
	}
	h.cutOff(m, a, "which was deleted")
	delete(m.reals, a)
	return nil
}

func (m *modelVirtual) order() []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(m.reals), netip.AddrPort.Compare)
}

// cutOff notes the connections that end with a real server. UDP has none that
// could break: the next datagram goes elsewhere.
func (h *Host) cutOff(m *modelVirtual, a netip.AddrPort, why string) {
	if n := m.reals[a].connections; n > 0 && m.Protocol != service.UDP {
		h.cut = append(h.cut, fmt.Sprintf("%d of %s %s to %s, %s", n, m.Protocol, m.Address, a, why))
	}
}

// Connect makes some connections to real servers that take them, at random.
func (h *Host) Connect(rng *rand.Rand) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range h.servers() {
		m := h.virtuals[k]
		for _, a := range m.order() {
			if m.reals[a].weight > 0 {
				m.reals[a].connections += rng.IntN(3)
			}
		}
	}
}

// Disconnect ends connections: of each real server some, at random, or all
// without rng.
func (h *Host) Disconnect(rng *rand.Rand) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range h.servers() {
		m := h.virtuals[k]
		for _, a := range m.order() {
			if rng == nil {
				m.reals[a].connections = 0
			} else {
				m.reals[a].connections -= rng.IntN(m.reals[a].connections + 1)
			}
		}
	}
}

// Cut returns which connections have been cut off, of TCP and SCTP.
func (h *Host) Cut() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.cut)
}

func (h *Host) servers() []server {
	return slices.SortedFunc(maps.Keys(h.virtuals), func(a, b server) int {
		return kernel.CompareVirtuals(kernel.Virtual{Protocol: a.protocol, Address: a.address}, kernel.Virtual{Protocol: b.protocol, Address: b.address})
	})
}

// AddForeignVirtual puts a virtual server there that isn't kproxy's.
func (h *Host) AddForeignVirtual(v kernel.Virtual) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.changeVirtual(ipvs.Request{Do: ipvs.Add, Virtual: v}, true)
	for _, r := range v.Reals {
		err = errors.Join(err, h.changeReal(ipvs.Request{Do: ipvs.Add, Virtual: v, Real: r}, true))
	}
	return err
}

// RemoveForeignVirtual removes what [Host.AddForeignVirtual] added.
func (h *Host) RemoveForeignVirtual(v kernel.Virtual) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := server{v.Protocol, v.Address}
	if m := h.virtuals[k]; m != nil && m.foreign {
		delete(h.virtuals, k)
	}
}

// AddForeignReal puts a real server that isn't kproxy's into a virtual server.
func (h *Host) AddForeignReal(v kernel.Virtual, r kernel.Real) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changeReal(ipvs.Request{Do: ipvs.Add, Virtual: v, Real: r}, true)
}

// RemoveForeignReals removes what [Host.AddForeignReal] added.
func (h *Host) RemoveForeignReals() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.virtuals {
		if !m.foreign {
			maps.DeleteFunc(m.reals, func(_ netip.AddrPort, r *modelReal) bool { return r.foreign })
		}
	}
}

// ForeignVirtuals prints the virtual and real servers that aren't kproxy's:
// those that somebody else made, and those that kproxy made but has no record
// of, so that it would never remove them.
func (h *Host) ForeignVirtuals() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := ""
	for _, k := range h.servers() {
		m := h.virtuals[k]
		switch {
		case m.foreign:
			out += printVirtual("foreign", m.Virtual)
		case !h.recorded(k):
			out += printVirtual("nobody's", m.Virtual)
		}
		for _, a := range m.order() {
			if r := m.reals[a]; r.foreign {
				out += fmt.Sprintf("foreign real server of %s %s: %s weight %d\n", k.protocol, k.address, a, r.weight)
			}
		}
	}
	return out
}

func (h *Host) recorded(k server) bool {
	set := h.sets[kernel.FamilySet(kernel.SetVirtual, service.FamilyOf(k.address.Addr()))]
	if set == nil {
		return false
	}
	_, ok := set.entries[fmt.Sprintf("%s,%s:%d", k.address.Addr(), k.protocol, k.address.Port())]
	return ok
}

func printVirtual(what string, v kernel.Virtual) string {
	return fmt.Sprintf("%s %s %s %s flags %d persistent %d\n", what, v.Protocol, v.Address, v.Scheduler, v.SchedFlags, v.Persistence)
}
