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

	"github.com/hashicorp/go-multierror"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
)

// Dummy is the [Link] of the kernel. It belongs to the network namespace of the
// thread that opened it.
type Dummy struct {
	handle    *netlink.Handle // one socket for all requests but the next one's
	mu        sync.Mutex      // one request and its answer at a time
	addresses *nlmsg.Socket
}

var _ Link = (*Dummy)(nil)

// OpenLink opens sockets. It doesn't make the link.
func OpenLink() (*Dummy, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open link %s: %w", kernel.DummyLink, err)
	}
	s, err := nlmsg.Open(unix.NETLINK_ROUTE, 4<<10)
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

// find returns the link, nil if there is none.
func (d *Dummy) find() (netlink.Link, error) {
	l, err := d.handle.LinkByName(kernel.DummyLink)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find link %s: %w", kernel.DummyLink, err)
	case l.Type() != "dummy":
		return nil, fmt.Errorf("%w: it is of type %s, kproxy's is a dummy; rename or delete it", ErrForeignLink, l.Type())
	}
	return l, nil
}

// dumps is how often a dump is tried that other changes interrupt.
const dumps = 5

// State implements [Link].
func (d *Dummy) State() (LinkState, error) {
	l, err := d.find()
	if err != nil || l == nil {
		return LinkState{}, err
	}
	s := LinkState{Exists: true, Up: l.Attrs().Flags&net.FlagUp != 0}
	var addresses []netlink.Addr
	for range dumps {
		if addresses, err = d.handle.AddrList(l, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
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
	l, err := d.find()
	if err != nil {
		return err
	}
	if l == nil {
		made := &netlink.Dummy{LinkAttrs: netlink.NewLinkAttrs()}
		made.Name = kernel.DummyLink
		if err := d.handle.LinkAdd(made); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make link %s: %w", kernel.DummyLink, dummyError(err))
		}
		if l, err = d.find(); err != nil {
			return err
		}
		if l == nil {
			return fmt.Errorf("make link %s: it is gone again", kernel.DummyLink)
		}
	}
	if l.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := d.handle.LinkSetUp(l); err != nil {
		return fmt.Errorf("set link %s up: %w", kernel.DummyLink, permission(err))
	}
	return nil
}

// Add implements [Link].
func (d *Dummy) Add(addresses ...netip.Addr) error {
	return d.each(addresses, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.EEXIST)
}

// Delete implements [Link].
func (d *Dummy) Delete(addresses ...netip.Addr) error {
	return d.each(addresses, unix.RTM_DELADDR, 0, unix.EADDRNOTAVAIL)
}

// each does something to each address; the error fine is none.
func (d *Dummy) each(addresses []netip.Addr, kind, flags uint16, fine unix.Errno) error {
	l, err := d.find()
	if err != nil {
		return err
	}
	if l == nil {
		return fmt.Errorf("change addresses of link %s: %w", kernel.DummyLink, kernel.ErrNotFound)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	results := d.addresses.Change(len(addresses), func(b []byte, i int) []byte {
		return appendAddress(nlmsg.AppendRequest(b, kind, flags), uint32(l.Attrs().Index), addresses[i])
	})
	var errs *multierror.Error
	for i, err := range results {
		if err != nil && !errors.Is(err, fine) {
			errs = multierror.Append(errs, &AddressError{addresses[i], permission(err)})
		}
	}
	return errs.ErrorOrNil()
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
	b = append(b, byte(addressFamily(a)), byte(a.BitLen()), 0, scope) // struct ifaddrmsg
	b = binary.NativeEndian.AppendUint32(b, link)
	b = nlmsg.Append(b, unix.IFA_LOCAL, a.AsSlice()...)
	b = nlmsg.Append(b, unix.IFA_ADDRESS, a.AsSlice()...)
	if a.Is4() {
		return b
	}
	// Nobody else is on the link to have the address as well. The local table has
	// its route, a second one in the main table is for nothing.
	b = nlmsg.AppendNative(b, unix.IFA_FLAGS, unix.IFA_F_NODAD|unix.IFA_F_NOPREFIXROUTE)
	life := make([]byte, unix.SizeofIfaCacheinfo) // preferred for 0 seconds
	binary.NativeEndian.PutUint32(life[4:], forever)
	return nlmsg.Append(b, unix.IFA_CACHEINFO, life...)
}

// forever is the kernel's INFINITY_LIFE_TIME.
const forever = math.MaxUint32

// Remove implements [Link].
func (d *Dummy) Remove() error {
	l, err := d.find()
	if err != nil || l == nil {
		return err
	}
	if err := d.handle.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove link %s: %w", kernel.DummyLink, permission(err))
	}
	return nil
}

func permission(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed", kernel.ErrPermission)
	}
	return err
}

// probeName is the link by which dummy links are tried.
const probeName = "kproxy-probe"

// probeLink finds out whether there can be a link of kproxy's.
func probeLink() error {
	d, err := OpenLink()
	if err != nil {
		return err
	}
	defer d.Close()
	if l, err := d.find(); err != nil || l != nil {
		return err
	}
	made := &netlink.Dummy{LinkAttrs: netlink.NewLinkAttrs()}
	made.Name = probeName
	if err := d.handle.LinkAdd(made); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make a dummy link: %w", dummyError(err))
	}
	return removeProbe()
}

// removeProbe removes the link that was tried. That there is none is no error.
func removeProbe() error {
	l, err := netlink.LinkByName(probeName)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the dummy link that was tried: %w", err)
	}
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove the dummy link that was tried: %w", err)
	}
	return nil
}

// dummyError says what a kernel lacks that can't make a dummy link.
func dummyError(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: kernel option CONFIG_DUMMY, or the kernel's module dummy", err)
	}
	return permission(err)
}
