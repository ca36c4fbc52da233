package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// linkAddress is an address of a link.
type linkAddress struct {
	address netip.Addr
	network netip.Prefix // of the other end on a point-to-point link
}

// addressesOf lists the addresses of links, by index. The kernel tells of these
// only (NETLINK_GET_STRICT_CHK, Linux 5.0) and not of thousands that may be on
// kproxy's own; an older one tells of all, and the others are passed over.
func addressesOf(links []int) (map[int][]linkAddress, error) {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	defer c.Close()
	_ = c.SetOption(netlink.GetStrictCheck, true) // older kernels don't have it
	out := make(map[int][]linkAddress, len(links))
	for _, link := range links {
		for _, family := range [...]uint8{unix.AF_INET, unix.AF_INET6} {
			found, err := addressesOfLink(c, family, link)
			if err != nil {
				return nil, fmt.Errorf("list addresses: %w", err)
			}
			out[link] = append(out[link], found...)
		}
	}
	return out, nil
}

// addressDumps is how often a list is asked for that other changes interrupt.
const addressDumps = 5

var errInterrupted = errors.New("addresses changed while they were listed")

func addressesOfLink(c *netlink.Conn, family uint8, link int) ([]linkAddress, error) {
	request := netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETADDR, Flags: netlink.Request | netlink.Dump},
		Data:   make([]byte, unix.SizeofIfAddrmsg),
	}
	request.Data[0] = family
	binary.NativeEndian.PutUint32(request.Data[4:], uint32(link))
	for range addressDumps {
		answers, err := c.Execute(request)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
			return nil, nil // a kernel without IPv6, or the link is gone
		}
		if err != nil {
			return nil, err
		}
		out, whole, err := parseAddresses(answers, family, link)
		if err != nil || whole {
			return out, err
		}
	}
	return nil, errInterrupted
}

// parseAddresses picks out those of a link; whole is false if the list was
// interrupted and may lack some.
func parseAddresses(answers []netlink.Message, family uint8, link int) (out []linkAddress, whole bool, err error) {
	for _, m := range answers {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return nil, false, nil
		}
		if m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg ||
			m.Data[0] != family || binary.NativeEndian.Uint32(m.Data[4:]) != uint32(link) {
			continue
		}
		a, err := parseAddress(m.Data[unix.SizeofIfAddrmsg:], int(m.Data[1]))
		if err != nil {
			return nil, false, err
		}
		out = append(out, a)
	}
	return out, true, nil
}

// parseAddress reads attributes: IFA_ADDRESS is the other end's where that is
// another than IFA_LOCAL, and the length belongs to it.
func parseAddress(attributes []byte, bits int) (linkAddress, error) {
	d, err := netlink.NewAttributeDecoder(attributes)
	if err != nil {
		return linkAddress{}, err
	}
	var out linkAddress
	for d.Next() {
		switch d.Type() {
		case unix.IFA_LOCAL:
			out.address, _ = netip.AddrFromSlice(d.Bytes())
		case unix.IFA_ADDRESS:
			if a, ok := netip.AddrFromSlice(d.Bytes()); ok {
				out.network = netip.PrefixFrom(a, bits)
			}
		}
	}
	if !out.address.IsValid() {
		out.address = out.network.Addr()
	}
	return out, d.Err()
}
