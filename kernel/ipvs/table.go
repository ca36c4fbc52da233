package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/moby/ipvs"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// ErrExists says that what was to be added is there.
var ErrExists = errors.New("exists")

// Table is the kernel's table of virtual servers, kproxy's and others'. Implementations
// are safe for concurrent use.
type Table interface {
	// List returns virtual servers in order ([kernel.CompareVirtuals]): all of
	// them, or those of the ones given that exist. Those by firewall mark, and of
	// protocols that kproxy doesn't know, are left out.
	List(of ...kernel.Virtual) ([]Server, error)
	// Change carries out requests in order, and returns the error of each: one that
	// fails keeps none from the next. A scheduler that the kernel doesn't have is an
	// [ErrScheduler].
	Change(requests ...Request) []error
}

// ErrScheduler says that the kernel doesn't have a scheduler.
var ErrScheduler = errors.New("no such scheduler")

// Server is a virtual server as the kernel has it.
type Server struct {
	kernel.Virtual // without Owner; Reals in order of address
	// Connections are how many each of Reals has, active and inactive ones.
	Connections []int
}

// Request says what a [Table] is asked to do.
type Request struct {
	Do      Verb
	Virtual kernel.Virtual
	// Real is the real server of Virtual that it is about. Without an address, it is
	// about Virtual itself. Virtual.Reals don't matter: a new virtual server has none,
	// an edited one keeps them, and they go with a deleted one.
	Real kernel.Real
}

// Verb says what is done to a virtual or real server.
type Verb int

// The verbs, as the commands of the kernel's netlink family: add doesn't touch
// what exists and edit makes nothing.
const (
	Add    Verb = iota // fails with [ErrExists]
	Edit               // fails with [kernel.ErrNotFound]
	Delete             // fails with [kernel.ErrNotFound]
)

func (v Verb) String() string { return [...]string{"add", "edit", "delete"}[v] }

// one carries out a single request.
func one(t Table, r Request) error { return t.Change(r)[0] }

func (r *Request) ofReal() bool { return r.Real.Address.IsValid() }

// Netlink is the [Table] of the kernel. It belongs to the network namespace of
// the thread that opened it.
type Netlink struct {
	mu      sync.Mutex      // one request and its answer at a time: moby's Handle mixes them up
	handle  *ipvs.Handle    // reads
	changes *netlink.Socket // and reads real servers
	family  uint16          // of IPVS, in generic netlink
}

var _ Table = (*Netlink)(nil)

// procPath is there where IPVS is in the kernel.
const procPath = "/proc/thread-self/net/ip_vs"

// Loaded reports whether the kernel has IPVS now. To ask for its netlink family would have
// the module loaded.
func Loaded() bool {
	_, err := os.Stat(procPath)
	return err == nil
}

// OpenTable opens the kernel's table. Without IPVS in the kernel it fails with
// [kernel.ErrNotFound]; see [Load].
func OpenTable() (*Netlink, error) {
	// moby's Handle doesn't fail where there is no IPVS: it takes the number of
	// the netlink family once and for all, and with 0 for it every request is
	// acknowledged and none has an effect.
	family, err := vnetlink.GenlFamilyGet("IPVS")
	if err != nil {
		return nil, fmt.Errorf("open table of virtual servers: %w: no generic netlink family IPVS (%v)", kernel.ErrNotFound, err)
	}
	t := &Netlink{family: family.ID}
	if t.handle, err = ipvs.New(""); err == nil {
		if t.changes, err = netlink.Open(unix.NETLINK_GENERIC, 32<<10); err == nil {
			return t, nil
		}
		t.handle.Close()
	}
	return nil, fmt.Errorf("open table of virtual servers: %w", err)
}

// Close closes the sockets.
func (t *Netlink) Close() {
	t.handle.Close()
	t.changes.Close()
}

// Flags of a virtual server (include/uapi/linux/ip_vs.h).
const (
	flagPersistent = 0x1
	flagHashed     = 0x2 // the kernel's own
)

// fewServers is up to how many virtual servers are asked for one by one, rather than all
// at once.
const fewServers = 64

// List implements [Table]. What is deleted meanwhile is left out, or has no real servers.
func (t *Netlink) List(of ...kernel.Virtual) ([]Server, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	services, err := t.services(of)
	if err != nil {
		return nil, err
	}
	asked := make(map[key]bool, len(of))
	for _, v := range of {
		asked[keyOf(v)] = true
	}
	out := make([]Server, 0, len(services))
	for _, s := range services {
		v, ok := virtualOf(s)
		if !ok || len(of) > 0 && !asked[keyOf(v)] {
			continue
		}
		server := Server{Virtual: v}
		if err := t.readReals(&server); err != nil {
			return nil, fmt.Errorf("list real servers of %s %s: %w", v.Protocol, v.Address, classify(err))
		}
		out = append(out, server)
	}
	sortServers(out)
	return out, nil
}

// services are all virtual servers, or, of a few, those that there are.
func (t *Netlink) services(of []kernel.Virtual) (out []*ipvs.Service, err error) {
	if len(of) == 0 || len(of) > fewServers {
		if out, err = t.handle.GetServices(); err != nil {
			err = fmt.Errorf("list virtual servers: %w", classify(err))
		}
		return out, err
	}
	for _, v := range of {
		s, err := t.handle.GetService(serviceOf(v))
		if err = classify(err); errors.Is(err, kernel.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read virtual server %s %s: %w", v.Protocol, v.Address, err)
		}
		out = append(out, s)
	}
	return out, nil
}

// sizeofGeneric is the size of struct genlmsghdr.
const sizeofGeneric = 4

// readReals asks for the real servers of s. moby's way takes 64 KiB of memory for each answer,
// and the Watch asks for those of every virtual server every few seconds.
func (t *Netlink) readReals(s *Server) error {
	about := Request{Do: Delete, Virtual: s.Virtual} // which names it, without settings
	return t.changes.Dump(func(b []byte) []byte {
		return netlink.AppendNested(append(netlink.AppendRequest(b, t.family, unix.NLM_F_DUMP), cmdGetDest, 1, 0, 0), attrService, about.appendVirtual) // version 1
	}, func(body []byte) {
		for typ, value := range netlink.Attributes(body[min(len(body), sizeofGeneric):]) {
			if typ == attrDest {
				r, connections := decodeReal(value, s.Address.Addr().Is6())
				s.Reals, s.Connections = append(s.Reals, r), append(s.Connections, connections)
			}
		}
	})
}

// decodeReal reads the attributes of a real server. Addresses have room for IPv6.
func decodeReal(attributes []byte, ipv6 bool) (r kernel.Real, connections int) {
	length := net.IPv4len
	if ipv6 {
		length = net.IPv6len
	}
	var address netip.Addr
	var port uint16
	for typ, v := range netlink.Attributes(attributes) {
		switch {
		case typ == destAddress && len(v) >= length:
			address, _ = netip.AddrFromSlice(v[:length])
		case typ == destPort && len(v) >= 2:
			port = binary.BigEndian.Uint16(v)
		case typ == destWeight && len(v) >= 4:
			r.Weight = binary.NativeEndian.Uint32(v)
		case (typ == destActive || typ == destInactive) && len(v) >= 4:
			connections += int(binary.NativeEndian.Uint32(v))
		}
	}
	r.Address = netip.AddrPortFrom(address, port)
	return r, connections
}

// sortServers brings virtual servers, and each one's real servers, in order.
func sortServers(servers []Server) {
	for i := range servers {
		servers[i].sortReals()
	}
	slices.SortFunc(servers, func(a, b Server) int { return kernel.CompareVirtuals(a.Virtual, b.Virtual) })
}

func (s *Server) sortReals() {
	byAddress := func(a, b kernel.Real) int { return a.Address.Compare(b.Address) }
	if slices.IsSortedFunc(s.Reals, byAddress) {
		return
	}
	counts := make(map[netip.AddrPort]int, len(s.Reals))
	for i, r := range s.Reals {
		counts[r.Address] = s.Connections[i]
	}
	slices.SortFunc(s.Reals, byAddress)
	for i, r := range s.Reals {
		s.Connections[i] = counts[r.Address]
	}
}

// key tells virtual servers apart.
type key struct {
	protocol service.Protocol
	address  netip.AddrPort
}

func keyOf(v kernel.Virtual) key { return key{v.Protocol, v.Address} }

// serviceOf is v as moby's Handle takes it.
func serviceOf(v kernel.Virtual) *ipvs.Service {
	s := &ipvs.Service{
		Address: v.Address.Addr().AsSlice(), Port: v.Address.Port(), Protocol: uint16(v.Protocol),
		AddressFamily: uint16(service.FamilyOf(v.Address.Addr()).Number()), SchedName: v.Scheduler, Flags: v.SchedFlags,
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

func realOf(d *ipvs.Destination) kernel.Real {
	a, _ := netip.AddrFromSlice(d.Address)
	return kernel.Real{Address: netip.AddrPortFrom(a, d.Port), Weight: uint32(d.Weight)}
}

// virtualOf is the reverse of [serviceOf]; false for what kproxy doesn't know.
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
	switch v.Protocol = service.Protocol(s.Protocol); v.Protocol {
	case service.TCP, service.UDP, service.SCTP:
		return v, true
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

// Change implements [Table].
func (t *Netlink) Change(requests ...Request) []error {
	t.mu.Lock()
	defer t.mu.Unlock()
	errs := t.changes.Change(len(requests), func(b []byte, i int) []byte { return requests[i].append(b, t.family) })
	for i, err := range errs {
		if err != nil {
			errs[i] = requests[i].explain(err)
		}
	}
	return errs
}

// explain says what the kernel's error is about, and what it means.
func (r *Request) explain(err error) error {
	v := r.Virtual
	if r.ofReal() {
		return fmt.Errorf("%s real server %s of %s %s: %w", r.Do, r.Real.Address, v.Protocol, v.Address, classify(err))
	}
	if errors.Is(err, unix.ENOENT) && r.Do != Delete {
		// A virtual server that isn't there is ESRCH (ip_vs_genl_set_cmd).
		err = fmt.Errorf("%w: %s", ErrScheduler, v.Scheduler)
	}
	return fmt.Errorf("%s virtual server %s %s: %w", r.Do, v.Protocol, v.Address, classify(err))
}

// Generic netlink's commands and attributes of virtual and real servers
// (include/uapi/linux/ip_vs.h).
const (
	cmdNewService = 1 // the next ones edit and delete
	cmdNewDest    = 5 // as these
	cmdGetDest    = 8

	attrService = 1 // of a command
	attrDest    = 2

	serviceFamily    = 1
	serviceProtocol  = 2
	serviceAddress   = 3
	servicePort      = 4
	serviceScheduler = 6
	serviceFlags     = 7
	serviceTimeout   = 8
	serviceNetmask   = 9

	destAddress        = 1
	destPort           = 2
	destForwarding     = 3
	destWeight         = 4
	destUpperThreshold = 5
	destLowerThreshold = 6
	destActive         = 7 // connections
	destInactive       = 8
)

// append encodes the request, to the netlink family of IPVS.
func (r *Request) append(b []byte, family uint16) []byte {
	command := cmdNewService + byte(r.Do)
	if r.ofReal() {
		command = cmdNewDest + byte(r.Do)
	}
	b = append(netlink.AppendRequest(b, family, 0), command, 1, 0, 0) // version 1
	b = netlink.AppendNested(b, attrService, r.appendVirtual)
	if r.ofReal() {
		b = netlink.AppendNested(b, attrDest, r.appendReal)
	}
	return b
}

// appendVirtual appends what names the virtual server, and if it is about that, its settings.
func (r *Request) appendVirtual(b []byte) []byte {
	s := serviceOf(r.Virtual)
	b = netlink.Append(b, serviceFamily, binary.NativeEndian.AppendUint16(nil, s.AddressFamily)...)
	b = netlink.Append(b, serviceProtocol, binary.NativeEndian.AppendUint16(nil, s.Protocol)...)
	b = netlink.Append(b, serviceAddress, s.Address...)
	b = netlink.Append(b, servicePort, binary.BigEndian.AppendUint16(nil, s.Port)...)
	if r.ofReal() || r.Do == Delete {
		return b
	}
	b = netlink.Append(b, serviceScheduler, append([]byte(s.SchedName), 0)...)
	b = netlink.Append(b, serviceFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.Flags), ^uint32(0))...)
	b = netlink.AppendNative(b, serviceTimeout, s.Timeout)
	return netlink.AppendNative(b, serviceNetmask, s.Netmask)
}

// appendReal appends the real server, to which connections are masqueraded (forwarding 0).
func (r *Request) appendReal(b []byte) []byte {
	b = netlink.Append(b, destAddress, r.Real.Address.Addr().AsSlice()...)
	b = netlink.Append(b, destPort, binary.BigEndian.AppendUint16(nil, r.Real.Address.Port())...)
	b = netlink.AppendNative(b, destForwarding, 0)
	b = netlink.AppendNative(b, destWeight, r.Real.Weight)
	b = netlink.AppendNative(b, destUpperThreshold, 0)
	return netlink.AppendNative(b, destLowerThreshold, 0)
}

// Timeouts says how long IPVS remembers idle connections. Zero leaves one as it
// is.
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
