package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// addressDumps is how often a list is asked for that other changes interrupt.
const addressDumps = 5

// NodeAddresses returns the addresses of the network namespace of the calling
// thread, on which node ports answer, sorted: those of every link that is up,
// but not loopback's nor kproxy's own, and none that have a meaning only on
// their link or that nobody can connect to.
func NodeAddresses() ([]netip.Addr, error) {
	links, err := interrupted(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	usable := make(map[int]bool, len(links))
	for _, l := range links {
		a := l.Attrs()
		usable[a.Index] = a.Flags&net.FlagUp != 0 && a.Flags&net.FlagLoopback == 0 && a.Name != DummyLink
	}
	// One list for all links: there is no asking the kernel for those of one.
	all, err := interrupted(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []netip.Addr
	for _, x := range all {
		if x.IPNet == nil || !usable[x.LinkIndex] {
			continue
		}
		a, ok := netip.AddrFromSlice(x.IP)
		if a = a.Unmap(); ok && !a.IsLinkLocalUnicast() && !a.IsLoopback() && !a.IsMulticast() && !a.IsUnspecified() {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// interrupted asks again when a change came in between.
func interrupted[T any](list func() (T, error)) (out T, err error) {
	for range addressDumps {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}
