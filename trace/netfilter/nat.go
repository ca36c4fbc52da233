package netfilter

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// maxRange bounds the addresses of a range that are told apart.
const maxRange = 64

// addressRange holds what a nat rule's argument names: addresses, and ports of
// which the kernel takes a free one.
type addressRange struct {
	addresses []netip.Addr // none: the packet's own
	first     uint16       // 0: the packet's own
	last      uint16
	// netmap is where the packet's own address goes, but for the network's bits; invalid for nowhere.
	netmap netip.Prefix
}

// netmapped has a's last bits, and the network's first ones (netmap_tg4 in net/netfilter/xt_NETMAP.c).
func netmapped(a netip.Addr, network netip.Prefix) netip.Addr {
	out, first := a.AsSlice(), network.Addr().AsSlice()
	for i := range network.Bits() {
		bit := byte(0x80 >> (i % 8))
		out[i/8] = out[i/8]&^bit | first[i/8]&bit
	}
	a, _ = netip.AddrFromSlice(out)
	return a
}

// parseRange reads "10.0.0.1-10.0.0.4:80-90", "[fd00::1]:80", "[fd00::1]-[fd00::4]:80", ":80".
func parseRange(s string) (r addressRange, ok bool) {
	text, ports := s, ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 && (i > strings.LastIndexByte(s, ']') && s[0] == '[' || strings.Count(s, ":") == 1) {
		text, ports = s[:i], s[i+1:]
	}
	text = strings.NewReplacer("[", "", "]", "").Replace(text)
	if ports != "" {
		first, last, isRange := strings.Cut(ports, "-")
		if !isRange {
			last = first
		}
		a, ok := parsePort(first)
		b, ok2 := parsePort(last) // "80-90/80" shifts them, and is no number
		if !ok || !ok2 || a > b {
			return r, false
		}
		r.first, r.last = a, b
	}
	if text == "" {
		return r, true
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	a, err := netip.ParseAddr(first)
	end, err2 := netip.ParseAddr(last)
	if err != nil || err2 != nil {
		return r, false
	}
	r.addresses = addressesOf(a, end)
	return r, r.addresses != nil
}

// addressesOf lists the addresses from one to another; nil if there are none, or too many.
func addressesOf(a, end netip.Addr) []netip.Addr {
	if end.Less(a) || end.BitLen() != a.BitLen() {
		return nil
	}
	out := []netip.Addr{a}
	for a != end {
		if a = a.Next(); len(out) == maxRange {
			return nil
		}
		out = append(out, a)
	}
	return out
}

func parsePort(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil
}

// translate is one of dnat, snat, redirect and masquerade, as nftables calls them.
func (w *walker) translate(kind string, x way, to addressRange, at position) result {
	p := &x.packet
	if to.netmap.IsValid() {
		own := p.Dst
		if kind == "snat" {
			own = p.Src
		}
		to.addresses = []netip.Addr{netmapped(own.Addr(), to.netmap)}
	}
	switch kind {
	case "redirect":
		to.addresses = []netip.Addr{w.redirected(p)}
		p.Redirected = true
	case "masquerade":
		to = addressRange{addresses: make([]netip.Addr, 1)}
		to.addresses[0], _ = w.tables.host.MasqueradeAddress(p.Out, p.Dst.Addr()) // invalid: unknown
	}
	if kind == "snat" || kind == "masquerade" {
		x.setSource(to, at)
		return result{pass: []way{x}}
	}
	return x.setDestination(to, at)
}

// redirected returns where REDIRECT leads: what this node sends goes to its loopback, what it
// receives to the interface's first address (nf_nat_redirect.c); invalid if it isn't known.
func (w *walker) redirected(p *Packet) (a netip.Addr) {
	if w.hook == Output {
		return [2]netip.Addr{service.IPv4: netip.AddrFrom4([4]byte{127, 0, 0, 1}), service.IPv6: netip.IPv6Loopback()}[w.tables.Family]
	}
	a, _ = w.tables.host.InterfaceAddress(p.In, w.tables.Family)
	return a
}

// setDestination is DNAT. One address of a range is chosen by a hash of the
// client's, which over many clients gives each its share (find_best_ips_proto in
// net/netfilter/nf_nat_core.c).
func (x way) setDestination(to addressRange, at position) (out result) {
	if len(to.addresses) == 0 {
		to.addresses = []netip.Addr{x.packet.Dst.Addr()}
	}
	port := x.packet.Dst.Port()
	if to.first > 0 && (port < to.first || port > to.last) {
		port = to.first
	}
	share := float64(len(to.addresses))
	x.lo, x.hi, x.rewrote, x.by = x.lo/share, x.hi/share, at.step, at.step
	for _, a := range to.addresses {
		y := x
		p := &y.packet
		dst := netip.AddrPortFrom(a, port)
		p.DNAT = p.DNAT || dst != p.Dst
		p.Dst, p.DstDone = dst, true
		p.Redirected = p.Redirected || slices.Contains(steering.ListenerAddress[:], a)
		out.pass = append(out.pass, y)
	}
	return out
}

// setSource is SNAT. Which of several addresses it is isn't known.
func (x *way) setSource(to addressRange, at position) {
	p := &x.packet
	a, port := p.Src.Addr(), p.Src.Port()
	if len(to.addresses) == 1 {
		a = to.addresses[0]
	} else if len(to.addresses) > 1 {
		a = netip.Addr{}
	}
	if to.first > 0 {
		port = to.first
	}
	src := netip.AddrPortFrom(a, port)
	p.SNAT = p.SNAT || src != p.Src
	p.Src, p.SrcDone = src, true
	x.masked, x.by = at.step, at.step
}
