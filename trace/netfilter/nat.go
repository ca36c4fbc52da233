package netfilter

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel/steering"
)

// maxRange bounds the addresses of a range that are told apart.
const maxRange = 64

// addressRange is what a nat rule's argument names: addresses, and ports of
// which the kernel takes a free one.
type addressRange struct {
	addresses []netip.Addr // none: the packet's own
	first     uint16       // 0: the packet's own
	last      uint16
}

// parseRange reads "10.0.0.1-10.0.0.4:80-90", "[fd00::1]:80", ":80".
func parseRange(s string) (r addressRange, ok bool) {
	addresses, ports := s, ""
	switch i := strings.LastIndexByte(s, ':'); {
	case strings.HasPrefix(s, "["):
		inside, rest, closed := strings.Cut(s[1:], "]")
		if !closed {
			return r, false
		}
		addresses, ports = strings.ReplaceAll(strings.ReplaceAll(inside, "[", ""), "]", ""), strings.TrimPrefix(rest, ":")
	case i >= 0 && strings.Count(s, ":") == 1:
		addresses, ports = s[:i], s[i+1:]
	}
	if r.first, r.last, ok = parsePorts(ports); !ok {
		return r, false
	}
	if addresses == "" {
		return r, true
	}
	first, last, ranged := strings.Cut(addresses, "-")
	a, err := netip.ParseAddr(first)
	if err != nil {
		return r, false
	}
	r.addresses = []netip.Addr{a}
	if !ranged {
		return r, true
	}
	end, err := netip.ParseAddr(last)
	if err != nil || end.Less(a) || end.BitLen() != a.BitLen() {
		return r, false
	}
	for a != end {
		if a = a.Next(); len(r.addresses) == maxRange {
			return r, false
		}
		r.addresses = append(r.addresses, a)
	}
	return r, true
}

// parsePorts reads "80", "80-90", or "80-90/80", which shifts them.
func parsePorts(s string) (first, last uint16, ok bool) {
	if s == "" {
		return 0, 0, true
	}
	s, _, shifted := strings.Cut(s, "/")
	lo, hi, ranged := strings.Cut(s, "-")
	if !ranged {
		hi = lo
	}
	a, err := strconv.ParseUint(lo, 10, 16)
	b, err2 := strconv.ParseUint(hi, 10, 16)
	return uint16(a), uint16(b), err == nil && err2 == nil && a <= b && !shifted
}

// destinationNAT is DNAT. One address of a range is chosen by a hash of the
// client's, which over many clients gives each its share (find_best_ips_proto in
// net/netfilter/nf_nat_core.c).
func destinationNAT(w *walker, x *xtables, in way, at place) result {
	o, _ := find(x.options, "--to-destination")
	to, ok := parseRange(o.arg(0))
	if !ok {
		return undecided(w, x, in, at)
	}
	return w.rewrite(in, to, at)
}

// rewrite gives a way's packet a new destination.
func (w *walker) rewrite(in way, to addressRange, at place) result {
	if len(to.addresses) == 0 {
		to.addresses = []netip.Addr{in.packet.Dst.Addr()}
	}
	share := float64(len(to.addresses))
	var out result
	for _, a := range to.addresses {
		x := in
		x.lo, x.hi = in.lo/share, in.hi/share
		port := in.packet.Dst.Port()
		if to.first > 0 && (port < to.first || port > to.last) {
			port = to.first
		}
		x.setDestination(netip.AddrPortFrom(a, port), at)
		out.pass = append(out.pass, x)
	}
	return out
}

func (x *way) setDestination(to netip.AddrPort, at place) {
	p := &x.packet
	p.DNAT = p.DNAT || to != p.Dst
	p.Dst, p.DstDone = to, true
	p.Redirected = p.Redirected || slices.Contains(steering.ListenerAddress[:], to.Addr())
	x.rewrote, x.by = at.step, at.step
}

// redirectNAT is REDIRECT: what this node sends goes to its loopback, what it
// receives to the interface's first address (nf_nat_redirect.c).
func redirectNAT(w *walker, x *xtables, in way, at place) result {
	o, given := find(x.options, "--to-ports")
	first, last, ok := parsePorts(o.arg(0))
	if given && !ok {
		return undecided(w, x, in, at)
	}
	return w.redirect(in, first, last, at)
}

func (w *walker) redirect(in way, first, last uint16, at place) result {
	p := &in.packet
	var a netip.Addr
	switch {
	case w.hook == Output:
		a = loopbacks[w.family()]
	case w.tables.host != nil && p.In != AnyInterface && p.In != "":
		a, _ = w.tables.host.InterfaceAddress(p.In, w.family()) // invalid: rules that look at it are undecided
	}
	port := p.Dst.Port()
	if first > 0 && (port < first || port > last) {
		port = first
	}
	in.setDestination(netip.AddrPortFrom(a, port), at)
	in.packet.Redirected = true
	return result{pass: []way{in}}
}

var loopbacks = [2]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// sourceNAT is SNAT; of a range the first address stands for all.
func sourceNAT(w *walker, x *xtables, in way, at place) result {
	o, _ := find(x.options, "--to-source")
	to, ok := parseRange(o.arg(0))
	if !ok {
		return undecided(w, x, in, at)
	}
	return w.setSource(in, to, at)
}

func (w *walker) setSource(in way, to addressRange, at place) result {
	p := &in.packet
	a, port := p.Src.Addr(), p.Src.Port()
	if len(to.addresses) > 1 {
		a = netip.Addr{} // one of several
	} else if len(to.addresses) == 1 {
		a = to.addresses[0]
	}
	if to.first > 0 {
		port = to.first
	}
	src := netip.AddrPortFrom(a, port)
	p.SNAT = p.SNAT || src != p.Src
	p.Src, p.SrcDone = src, true
	in.masked, in.by = at.step, at.step
	return result{pass: []way{in}}
}

// masqueradeNAT is MASQUERADE.
func masqueradeNAT(w *walker, _ *xtables, in way, at place) result { return w.masquerade(in, at) }

func (w *walker) masquerade(in way, at place) result {
	p := &in.packet
	var a netip.Addr
	if w.tables.host != nil && p.Out != AnyInterface && p.Out != "" {
		a, _ = w.tables.host.MasqueradeAddress(p.Out, p.Dst.Addr()) // invalid: unknown
	}
	p.Masquerade = true
	return w.setSource(in, addressRange{addresses: []netip.Addr{a}}, at)
}
