package kerneltest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// IPVS is the virtual servers of a [Host], by the commands of its netlink
// family. It refuses what the kernel refuses, with the same error numbers
// (ip_vs_genl_set_cmd, ip_vs_add_service and ip_vs_add_dest in
// net/netfilter/ipvs/ip_vs_ctl.c).
type IPVS struct{ host *Host }

// IPVS returns the host's virtual servers.
func (h *Host) IPVS() *IPVS { return &IPVS{h} }

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

// NewService makes a virtual server, without real servers.
func (s *IPVS) NewService(v kernel.Virtual) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	return s.host.newService(v, false)
}

func (h *Host) newService(v kernel.Virtual, foreign bool) error {
	k := server{v.Protocol, v.Address}
	switch {
	case h.virtuals[k] != nil:
		return unix.EEXIST
	case !v.Address.IsValid() || v.Address.Port() == 0:
		return unix.EINVAL
	case !slices.Contains(h.schedulers, v.Scheduler):
		return unix.ENOENT
	}
	v.Reals, v.Owner = nil, service.Key{}
	h.virtuals[k] = &modelVirtual{Virtual: v, reals: map[netip.AddrPort]*modelReal{}, foreign: foreign}
	return nil
}

// SetService gives a virtual server other settings.
func (s *IPVS) SetService(v kernel.Virtual) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	m := s.host.virtuals[server{v.Protocol, v.Address}]
	switch {
	case m == nil:
		return unix.ESRCH
	case !slices.Contains(s.host.schedulers, v.Scheduler):
		return unix.ENOENT
	}
	v.Reals, v.Owner = nil, service.Key{}
	m.Virtual = v
	return nil
}

// DelService removes a virtual server with all its real servers.
func (s *IPVS) DelService(v kernel.Virtual) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	k := server{v.Protocol, v.Address}
	m := s.host.virtuals[k]
	if m == nil {
		return unix.ESRCH
	}
	for _, a := range m.order() {
		s.host.cutOff(m, a, "whose virtual server was deleted")
	}
	delete(s.host.virtuals, k)
	return nil
}

// NewDest makes a real server.
func (s *IPVS) NewDest(v kernel.Virtual, r kernel.Real) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	return s.host.newDest(v, r, false)
}

func (h *Host) newDest(v kernel.Virtual, r kernel.Real, foreign bool) error {
	m := h.virtuals[server{v.Protocol, v.Address}]
	switch {
	case m == nil:
		return unix.ESRCH
	case service.FamilyOf(r.Address.Addr()) != service.FamilyOf(v.Address.Addr()):
		return unix.EINVAL // only tunnels lead to the other family
	case m.reals[r.Address] != nil:
		return unix.EEXIST
	}
	m.reals[r.Address] = &modelReal{weight: r.Weight, foreign: foreign}
	return nil
}

// SetDest gives a real server another weight.
func (s *IPVS) SetDest(v kernel.Virtual, r kernel.Real) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	m := s.host.virtuals[server{v.Protocol, v.Address}]
	switch {
	case m == nil:
		return unix.ESRCH
	case m.reals[r.Address] == nil:
		return unix.ENOENT
	}
	defer s.host.vacated(m, m.serving())
	m.reals[r.Address].weight = r.Weight
	return nil
}

// DelDest removes a real server. Its connections are as good as broken.
func (s *IPVS) DelDest(v kernel.Virtual, a netip.AddrPort) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	m := s.host.virtuals[server{v.Protocol, v.Address}]
	switch {
	case m == nil:
		return unix.ESRCH
	case m.reals[a] == nil:
		return unix.ENOENT
	}
	defer s.host.vacated(m, m.serving())
	s.host.cutOff(m, a, "which was deleted")
	delete(m.reals, a)
	return nil
}

// serving reports whether a real server takes connections.
func (m *modelVirtual) serving() bool {
	for _, r := range m.reals {
		if r.weight > 0 {
			return true
		}
	}
	return false
}

// vacated notes a virtual server that nobody takes connections for any more.
func (h *Host) vacated(m *modelVirtual, before bool) {
	if before && !m.serving() {
		h.vacant = append(h.vacant, m.Protocol.String()+" "+m.Address.String())
	}
}

// Vacant returns the virtual servers that have, at some moment, lost the last
// real server that took connections.
func (h *Host) Vacant() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.vacant)
}

// List returns the virtual servers with their real servers.
func (s *IPVS) List() []kernel.Virtual {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	var out []kernel.Virtual
	for _, m := range s.host.virtuals {
		v := m.Virtual
		for _, a := range m.order() {
			v.Reals = append(v.Reals, kernel.Real{Address: a, Weight: m.reals[a].weight})
		}
		out = append(out, v)
	}
	slices.SortFunc(out, kernel.CompareVirtuals)
	return out
}

// Connections returns how many connections a real server has, active and
// inactive; none if there is no such real server.
func (s *IPVS) Connections(v kernel.Virtual, a netip.AddrPort) int {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if m := s.host.virtuals[server{v.Protocol, v.Address}]; m != nil && m.reals[a] != nil {
		return m.reals[a].connections
	}
	return 0
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
	if err := h.newService(v, true); err != nil {
		return err
	}
	for _, r := range v.Reals {
		if err := h.newDest(v, r, true); err != nil {
			return err
		}
	}
	return nil
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
	return h.newDest(v, r, true)
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
