package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// Link is [kernel.DummyLink]. Implementations are safe for concurrent use.
type Link interface {
	// State reads the link. One of the same name that isn't a dummy link is an
	// [ErrForeignLink].
	State() (LinkState, error)
	// Ensure makes the link unless it exists, and sets it up.
	Ensure() error
	// Add puts addresses on the link, and says of which it couldn't. That one is there
	// already is no error. An error concerns all of them.
	Add(addresses ...netip.Addr) (failed map[netip.Addr]error, err error)
	// Delete takes addresses off the link, in the same way. That one isn't there
	// is no error.
	Delete(addresses ...netip.Addr) (failed map[netip.Addr]error, err error)
	// Remove removes the link. That there is none is no error.
	Remove() error
}

// ErrForeignLink says that a link of another type has the name that kproxy's has.
var ErrForeignLink = errors.New("another program's link")

// LinkState holds what is known of the link.
type LinkState struct {
	Exists bool
	Up     bool
	// Addresses are sorted, without link-local ones, which the kernel adds itself.
	Addresses []netip.Addr
}

// Dummy is the [Link] of the kernel. It belongs to the network namespace of the
// thread that opened it.
type Dummy struct {
	handle    *vnetlink.Handle // one socket for all requests but the next one's
	mu        sync.Mutex       // one request and its answer at a time
	addresses *netlink.Socket
}

var _ Link = (*Dummy)(nil)

// OpenLink opens sockets. It doesn't make the link.
func OpenLink() (*Dummy, error) {
	h, err := vnetlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open link %s: %w", kernel.DummyLink, err)
	}
	s, err := netlink.Open(unix.NETLINK_ROUTE, 4<<10)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open link %s: %w", kernel.DummyLink, err)
	}
	return &Dummy{handle: h, addresses: s}, nil
}

// Close closes the sockets.
func (d *Dummy) Close() {
	d.handle.Close()
	d.addresses.Close()
}

// find returns a link, nil if there is none.
func (d *Dummy) find(name string) (vnetlink.Link, error) {
	l, err := d.handle.LinkByName(name)
	switch {
	case errors.As(err, new(vnetlink.LinkNotFoundError)):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find link %s: %w", name, err)
	case l.Type() != "dummy":
		return nil, fmt.Errorf("%w is called %s: it is of type %s, kproxy's is a dummy; rename or delete it", ErrForeignLink, name, l.Type())
	}
	return l, nil
}

// create makes a dummy link, unless it exists.
func (d *Dummy) create(name string) error {
	l := &vnetlink.Dummy{LinkAttrs: vnetlink.NewLinkAttrs()}
	l.Name = name
	err := d.handle.LinkAdd(l)
	switch {
	case err == nil, errors.Is(err, unix.EEXIST):
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		err = fmt.Errorf("%w: kernel option CONFIG_DUMMY, or the kernel's module dummy", err)
	}
	return fmt.Errorf("make dummy link %s: %w", name, classify(err))
}

// remove removes a dummy link. That there is none is no error.
func (d *Dummy) remove(name string) error {
	l, err := d.find(name)
	if err != nil || l == nil {
		return err
	}
	if err := d.handle.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove link %s: %w", name, classify(err))
	}
	return nil
}

// dumps is how often a dump is tried that other changes interrupt.
const dumps = 5

// State implements [Link].
func (d *Dummy) State() (LinkState, error) {
	l, err := d.find(kernel.DummyLink)
	if err != nil || l == nil {
		return LinkState{}, err
	}
	s := LinkState{Exists: true, Up: l.Attrs().Flags&net.FlagUp != 0}
	var addresses []vnetlink.Addr
	for range dumps {
		if addresses, err = d.handle.AddrList(l, vnetlink.FAMILY_ALL); !errors.Is(err, vnetlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return LinkState{}, fmt.Errorf("list addresses of %s: %w", kernel.DummyLink, err)
	}
	for _, x := range addresses {
		if a, ok := netip.AddrFromSlice(x.IP); ok && !a.Unmap().IsLinkLocalUnicast() {
			s.Addresses = append(s.Addresses, a.Unmap())
		}
	}
	slices.SortFunc(s.Addresses, netip.Addr.Compare)
	return s, nil
}

// Ensure implements [Link].
func (d *Dummy) Ensure() error {
	l, err := d.find(kernel.DummyLink)
	if err == nil && l == nil {
		if err = d.create(kernel.DummyLink); err == nil {
			l, err = d.find(kernel.DummyLink)
		}
	}
	switch {
	case err != nil:
		return err
	case l == nil:
		return fmt.Errorf("make link %s: it is gone again", kernel.DummyLink)
	case l.Attrs().Flags&net.FlagUp != 0:
		return nil
	}
	if err := d.handle.LinkSetUp(l); err != nil {
		return fmt.Errorf("set link %s up: %w", kernel.DummyLink, classify(err))
	}
	return nil
}

// Add implements [Link].
func (d *Dummy) Add(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return d.each(addresses, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.EEXIST)
}

// Delete implements [Link].
func (d *Dummy) Delete(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return d.each(addresses, unix.RTM_DELADDR, 0, unix.EADDRNOTAVAIL)
}

// each does something to each address; the error fine is none.
func (d *Dummy) each(addresses []netip.Addr, kind, flags uint16, fine unix.Errno) (failed map[netip.Addr]error, err error) {
	l, err := d.find(kernel.DummyLink)
	if err != nil {
		return nil, err
	}
	if l == nil {
		return nil, fmt.Errorf("change addresses of link %s: %w", kernel.DummyLink, kernel.ErrNotFound)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	failed = map[netip.Addr]error{}
	for i, err := range d.addresses.Change(len(addresses), func(b []byte, i int) []byte {
		return appendAddress(netlink.AppendRequest(b, kind, flags), uint32(l.Attrs().Index), addresses[i])
	}) {
		if err != nil && !errors.Is(err, fine) {
			failed[addresses[i]] = fmt.Errorf("address %s: %w", addresses[i], classify(err))
		}
	}
	return failed, nil
}

// appendAddress appends a service address as it is put on the link: one by itself,
// and never the source of a connection that has nothing to do with it, where
// the node has no better address on the link it leaves by. IPv4 does without
// those of scope host there (inet_select_addr); IPv6 prefers any that isn't
// deprecated (RFC 6724, rule 3).
func appendAddress(b []byte, link uint32, a netip.Addr) []byte {
	scope := byte(unix.RT_SCOPE_UNIVERSE)
	if a.Is4() {
		scope = unix.RT_SCOPE_HOST
	}
	b = append(b, service.FamilyOf(a).Number(), byte(a.BitLen()), 0, scope) // struct ifaddrmsg
	b = binary.NativeEndian.AppendUint32(b, link)
	b = netlink.AppendAddr(netlink.AppendAddr(b, unix.IFA_LOCAL, a), unix.IFA_ADDRESS, a)
	if a.Is4() {
		return b
	}
	// No other node is on the link that could have the address as well. The local table
	// has its route; a second one in the main table is for nothing.
	b = netlink.AppendNative(b, unix.IFA_FLAGS, unix.IFA_F_NODAD|unix.IFA_F_NOPREFIXROUTE)
	life := make([]byte, unix.SizeofIfaCacheinfo) // preferred for 0 seconds
	binary.NativeEndian.PutUint32(life[4:], forever)
	return netlink.Append(b, unix.IFA_CACHEINFO, life...)
}

// forever is the kernel's INFINITY_LIFE_TIME.
const forever = math.MaxUint32

// Remove implements [Link].
func (d *Dummy) Remove() error { return d.remove(kernel.DummyLink) }

// probeName is the link by which dummy links are tried.
const probeName = "kproxy-probe"

// probeLink finds out whether the kernel can make [kernel.DummyLink].
func probeLink() error {
	d, err := OpenLink()
	if err != nil {
		return err
	}
	defer d.Close()
	if l, err := d.find(kernel.DummyLink); err != nil || l != nil {
		return err
	}
	if err := d.create(probeName); err != nil {
		return err
	}
	return d.remove(probeName)
}
