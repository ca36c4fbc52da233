package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// Netlink is the [Table] of the kernel. It belongs to the network namespace of
// the thread that opened it.
type Netlink struct {
	mu      sync.Mutex   // one request and its answer at a time: moby's Handle mixes them up
	handle  *ipvs.Handle // reads
	changes *nlmsg.Socket
	family  uint16 // of IPVS, in generic netlink
	proc    *os.File
	text    bytes.Buffer // of proc, kept for its memory
}

var _ Table = (*Netlink)(nil)

// OpenTable opens the kernel's table. Without IPVS in the kernel it fails with
// [kernel.ErrNotFound]; see [Load].
func OpenTable() (*Netlink, error) {
	// moby's Handle doesn't fail where there is no IPVS: it takes the number of
	// the netlink family once and for all, and with 0 for it every request is
	// acknowledged and none has an effect.
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return nil, fmt.Errorf("open table of virtual servers: %w: no generic netlink family IPVS (%v)", kernel.ErrNotFound, err)
	}
	h, err := ipvs.New("")
	if err != nil {
		return nil, fmt.Errorf("open table of virtual servers: %w", err)
	}
	f, err := os.Open(procPath)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open table of virtual servers: %w", err)
	}
	changes, err := nlmsg.Open(unix.NETLINK_GENERIC, 4<<10)
	if err != nil {
		h.Close()
		f.Close()
		return nil, fmt.Errorf("open table of virtual servers: %w", err)
	}
	return &Netlink{handle: h, changes: changes, family: family.ID, proc: f}, nil
}

// Close closes the sockets.
func (t *Netlink) Close() {
	t.handle.Close()
	t.changes.Close()
	t.proc.Close()
}

// Flags of a virtual server (include/uapi/linux/ip_vs.h).
const (
	flagPersistent = 0x1
	flagHashed     = 0x2 // the kernel's own
)

// fewServers is up to how many virtual servers are asked for one by one, two
// requests each, rather than all at once.
const fewServers = 64

// List implements [Table].
func (t *Netlink) List(of ...kernel.Virtual) ([]Server, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(of) > 0 && len(of) <= fewServers {
		return t.listSome(of)
	}
	// The settings come from netlink, the real servers from /proc if it has them.
	// What is deleted in between is left out.
	services, err := t.handle.GetServices()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", classify(err))
	}
	settings := make(map[key]kernel.Virtual, len(services))
	for _, s := range services {
		if v, ok := virtualOf(s); ok {
			settings[keyOf(v)] = v
		}
	}
	if len(of) > 0 {
		wanted := make(map[key]kernel.Virtual, len(of))
		for _, v := range of {
			if s, ok := settings[keyOf(v)]; ok {
				wanted[keyOf(v)] = s
			}
		}
		settings = wanted
	}
	servers, err := t.glance()
	if err != nil {
		return nil, err
	}
	out := servers[:0]
	for _, s := range servers {
		if v, ok := settings[keyOf(s.Virtual)]; ok {
			v.Reals = s.Reals
			out = append(out, Server{Virtual: v, Connections: s.Connections})
			delete(settings, keyOf(s.Virtual))
		}
	}
	if len(settings) == 0 {
		return out, nil
	}
	passedOver, err := t.listSome(slices.Collect(maps.Values(settings))) // see glance
	if err != nil {
		return nil, err
	}
	out = append(out, passedOver...)
	sortServers(out)
	return out, nil
}

// listSome asks for each of a few virtual servers.
func (t *Netlink) listSome(of []kernel.Virtual) ([]Server, error) {
	var out []Server
	for _, v := range of {
		s, err := t.handle.GetService(serviceOf(v))
		if err = classify(err); errors.Is(err, kernel.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look at virtual server %s %s: %w", v.Protocol, v.Address, err)
		}
		found, ok := virtualOf(s)
		if !ok {
			continue
		}
		destinations, err := t.handle.GetDestinations(s)
		if err != nil {
			return nil, fmt.Errorf("list real servers of %s %s: %w", v.Protocol, v.Address, classify(err))
		}
		server := Server{Virtual: found}
		for _, d := range destinations {
			a, _ := netip.AddrFromSlice(d.Address)
			server.Reals = append(server.Reals, kernel.Real{Address: netip.AddrPortFrom(a, d.Port), Weight: uint32(d.Weight)})
			server.Connections = append(server.Connections, d.ActiveConnections+d.InactiveConnections)
		}
		out = append(out, server)
	}
	sortServers(out)
	return out, nil
}

// Glance implements [Table].
func (t *Netlink) Glance() ([]Server, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.glance()
}

// glance reads /proc/net/ip_vs, which comes a page at a time. Where other network
// namespaces have virtual servers too, the kernel passes over some of this one's
// between two pages: it counts everybody's to know where it is, and this
// namespace's only to get there again (ip_vs_info_seq_next and ip_vs_info_array
// in net/netfilter/ipvs/ip_vs_ctl.c).
func (t *Netlink) glance() ([]Server, error) {
	if _, err := t.proc.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read %s: %w", procPath, err)
	}
	t.text.Reset()
	if _, err := t.text.ReadFrom(t.proc); err != nil {
		return nil, fmt.Errorf("read %s: %w", procPath, err)
	}
	return ParseProc(t.text.Bytes())
}

// key is what tells virtual servers apart.
type key struct {
	protocol service.Protocol
	address  netip.AddrPort
}

func keyOf(v kernel.Virtual) key { return key{v.Protocol, v.Address} }

// protocolNumbers are those of the Internet protocols.
var protocolNumbers = map[service.Protocol]uint16{service.TCP: unix.IPPROTO_TCP, service.UDP: unix.IPPROTO_UDP, service.SCTP: unix.IPPROTO_SCTP}

func addressFamily(a netip.Addr) uint16 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// serviceOf is v as moby's Handle takes it.
func serviceOf(v kernel.Virtual) *ipvs.Service {
	s := &ipvs.Service{
		Address: v.Address.Addr().AsSlice(), Port: v.Address.Port(), Protocol: protocolNumbers[v.Protocol],
		AddressFamily: addressFamily(v.Address.Addr()), SchedName: v.Scheduler, Flags: v.SchedFlags,
		// Every client is one of its own: a mask for IPv4, a length for IPv6, which
		// has to be given without persistence, too (ip_vs_add_service).
		Netmask: 0xffffffff,
	}
	if v.Address.Addr().Is6() {
		s.Netmask = 128
	}
	if v.Persistence > 0 {
		s.Flags |= flagPersistent
		s.Timeout = v.Persistence
	}
	return s
}

// virtualOf is the reverse; false for what kproxy doesn't know.
func virtualOf(s *ipvs.Service) (kernel.Virtual, bool) {
	a, ok := netip.AddrFromSlice(s.Address)
	if !ok || s.FWMark != 0 {
		return kernel.Virtual{}, false
	}
	v := kernel.Virtual{
		Address: netip.AddrPortFrom(a, s.Port), Scheduler: s.SchedName,
		SchedFlags: s.Flags &^ (flagPersistent | flagHashed),
	}
	if s.Flags&flagPersistent != 0 {
		v.Persistence = s.Timeout
	}
	for p, n := range protocolNumbers {
		if n == s.Protocol {
			v.Protocol = p
			return v, true
		}
	}
	return v, false
}

// classify gives IPVS's errors their meaning.
func classify(err error) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		return ErrExists
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT):
		return kernel.ErrNotFound
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed", kernel.ErrPermission)
	}
	return err
}

// Timeouts are how long IPVS remembers connections that are idle. Zero leaves
// one as it is.
type Timeouts struct{ TCP, TCPFin, UDP time.Duration }

// SetTimeouts sets them, whole seconds, and returns what the kernel has then.
func (t *Netlink) SetTimeouts(want Timeouts) (Timeouts, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.handle.SetConfig(&ipvs.Config{TimeoutTCP: want.TCP, TimeoutTCPFin: want.TCPFin, TimeoutUDP: want.UDP})
	if err != nil {
		return Timeouts{}, fmt.Errorf("set time-outs of IPVS: %w", classify(err))
	}
	c, err := t.handle.GetConfig()
	if err != nil {
		return Timeouts{}, fmt.Errorf("read time-outs of IPVS: %w", classify(err))
	}
	have := Timeouts{c.TimeoutTCP, c.TimeoutTCPFin, c.TimeoutUDP}
	for _, x := range []struct{ have, want time.Duration }{{have.TCP, want.TCP}, {have.TCPFin, want.TCPFin}, {have.UDP, want.UDP}} {
		if x.want != 0 && x.have != x.want.Truncate(time.Second) {
			return have, fmt.Errorf("set time-outs of IPVS: they are %v instead of %v", have, want)
		}
	}
	return have, nil
}
