package netfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// matcher says whether a module's option holds for a packet.
type matcher func(w *walker, p *Packet, o option) held

// matchers are the modules of which every option can be judged alone, by the
// name after -m; an empty one is a rule's own options.
var matchers = map[string]matcher{
	"": own, "tcp": ports, "udp": ports, "sctp": ports, "multiport": multiport, "mark": mark, "connmark": connmark,
	"iprange": iprange, "pkttype": packetType,
}

// whole are the modules whose options belong together.
var whole = map[string]func(w *walker, p *Packet, m *module) held{
	"set": inSet, "addrtype": addressType, "statistic": statistic, "socket": socket, "owner": owner, "rpfilter": rpfilter,
	"recent": recent, "physdev": physdev, "conntrack": conntrack, "state": conntrack,
}

// harmless are the modules that always match.
var harmless = map[string]bool{"comment": true}

// headers are the modules for headers that no traced packet has.
var headers = map[string]bool{
	"rt": true, "frag": true, "hbh": true, "dst": true, "mh": true, "ah": true, "esp": true, "icmp": true, "icmp6": true, "dccp": true,
	"udplite": true, "ipcomp": true, "l2tp": true,
}

// depends says what modules look at that a walk doesn't know.
var depends = map[string]string{
	"limit": "the rate of packets", "hashlimit": "the rate of packets", "connlimit": "how many connections there are",
	"time": "the time of day", "quota": "how much has passed",
	"mac": "the hardware address", "length": "the packet's length", "connbytes": "how much the connection has carried",
	"ttl": "the hop limit", "hl": "the hop limit", "string": "the packet's content", "u32": "the packet's content",
	"bpf": "a program", "policy": "IPsec", "dscp": "the packet's service class", "tos": "the packet's service class",
}

// holds implements [part].
func (m *module) holds(w *walker, p *Packet) held {
	switch {
	case harmless[m.name]:
		return held{answer: Yes}
	case headers[m.name]:
		return held{answer: No, why: "it has no header of " + m.name}
	}
	if f := whole[m.name]; f != nil {
		return f(w, p, m)
	}
	f := matchers[m.name]
	if f == nil {
		if what := depends[m.name]; what != "" {
			return maybe("it depends on %s (-m %s)", what, m.name)
		}
		return maybe("the match %s isn't known to this program", m.name)
	}
	out := held{answer: Yes}
	for _, o := range m.options {
		switch h := f(w, p, o); h.answer {
		case No:
			return h
		case Yes:
		default:
			out = h
		}
	}
	return out
}

func maybe(format string, args ...any) held {
	return held{answer: Maybe, why: fmt.Sprintf(format, args...)}
}

// is turns what an option asks, and its "!", into an answer.
func is(yes, not bool, format string, args ...any) held {
	if yes != not {
		return held{answer: Yes}
	}
	return held{answer: No, why: fmt.Sprintf(format, args...)}
}

// invert is the answer to an option with "!".
func (h held) invert(not bool) held {
	switch {
	case !not:
	case h.answer == Yes:
		h.answer = No
	case h.answer == No:
		h.answer = Yes
	case h.answer == Chance:
		h.chance = 1 - h.chance
	}
	return h
}

// own are a rule's own options.
func own(_ *walker, p *Packet, o option) held {
	switch o.name {
	case "-s":
		return address(p.Src.Addr(), o.arg(0), o.not, "source")
	case "-d":
		return address(p.Dst.Addr(), o.arg(0), o.not, "destination")
	case "-p":
		return protocol(p.Protocol, o)
	case "-i":
		return iface(p.In, o, "comes in on")
	case "-o":
		return iface(p.Out, o, "leaves by")
	case "-f":
		return is(false, o.not, "it is no fragment")
	}
	return maybe("the option %s isn't known to this program", o.name)
}

func address(a netip.Addr, network string, not bool, what string) held {
	in, ok := contains(network, a)
	if !ok && all(network) {
		in, ok = true, true
	}
	if !ok {
		return maybe("the %s address isn't known", what)
	}
	return is(in, not, "its %s is %s", what, a)
}

func all(network string) bool { return strings.HasSuffix(network, "/0") }

// contains reads a network as iptables prints it: with a length, or with a mask
// where that is no length.
func contains(network string, a netip.Addr) (in, ok bool) {
	if !a.IsValid() {
		return false, false
	}
	base, mask, masked := strings.Cut(network, "/")
	b, err := netip.ParseAddr(base)
	if err != nil {
		return false, false
	}
	if b.BitLen() != a.BitLen() {
		return false, true
	}
	if !masked {
		return a == b, true
	}
	if n, err := strconv.Atoi(mask); err == nil {
		p, err := b.Prefix(n)
		return err == nil && p.Contains(a), err == nil
	}
	m, err := netip.ParseAddr(mask)
	if err != nil || m.BitLen() != a.BitLen() {
		return false, false
	}
	x, y, bits := a.AsSlice(), b.AsSlice(), m.AsSlice()
	for i := range x {
		if x[i]&bits[i] != y[i]&bits[i] {
			return false, true
		}
	}
	return true, true
}

// protocolNumbers are those that iptables prints by name.
var protocolNumbers = map[string]int{"tcp": 6, "udp": 17, "sctp": 132, "all": 0}

// otherProtocols are names of those that no service port has.
var otherProtocols = map[string]bool{
	"icmp": true, "icmpv6": true, "ipv6-icmp": true, "esp": true, "ah": true, "gre": true, "dccp": true, "igmp": true,
	"udplite": true, "ipv6-mh": true, "vrrp": true, "ipip": true, "ipv6": true, "ospf": true, "pim": true, "ipencap": true,
}

func protocol(have service.Protocol, o option) held {
	name := strings.ToLower(o.arg(0))
	n, known := protocolNumbers[name]
	if !known {
		var err error
		if n, err = strconv.Atoi(name); err != nil && !otherProtocols[name] {
			return maybe("the protocol %s isn't known to this program", name)
		}
		if err != nil {
			n = -1
		}
	}
	return is(n == 0 || n == int(have), o.not, "its protocol is %s", have)
}

// iface compares as ifname_compare does: "eth+" is every name that begins so.
func iface(have string, o option, does string) held {
	want := o.arg(0)
	prefix, wild := strings.CutSuffix(want, "+")
	switch {
	case wild && prefix == "":
		return is(true, o.not, "it %s some interface", does)
	case have == AnyInterface:
		return maybe("which interface it %s isn't known", does)
	case have == "":
		return is(false, o.not, "it %s none", does)
	}
	return is(have == want || wild && strings.HasPrefix(have, prefix), o.not, "it %s %s", does, have)
}

// ports are the options of TCP, UDP and SCTP.
func ports(_ *walker, p *Packet, o option) held {
	switch o.name {
	case "--dport", "--destination-port":
		return portIn(p.Dst.Port(), o.arg(0), o.not, "destination")
	case "--sport", "--source-port":
		return portIn(p.Src.Port(), o.arg(0), o.not, "source")
	case "--tcp-flags":
		return flags(p, o)
	}
	return maybe("the option %s isn't known to this program", o.name)
}

// portIn compares with "80", "80:90" or names of ports, which iptables-save
// never prints.
func portIn(have uint16, want string, not bool, what string) held {
	lo, hi, ok := portRange(want)
	if !ok {
		return maybe("the port %s isn't known to this program", want)
	}
	if have == 0 && what == "source" {
		if lo == 0 && hi == 0xffff {
			return is(true, not, "its source port may be any")
		}
		return maybe("the source port isn't known")
	}
	return is(lo <= have && have <= hi, not, "its %s port is %d", what, have)
}

func portRange(s string) (lo, hi uint16, ok bool) {
	first, last, ranged := strings.Cut(s, ":")
	if !ranged {
		last = first
	}
	a, err := strconv.ParseUint(first, 10, 16)
	b, err2 := strconv.ParseUint(last, 10, 16)
	return uint16(a), uint16(b), err == nil && err2 == nil
}

// allFlags are those that ALL stands for.
var allFlags = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"}

// flags compares those that a rule looks at with those that are to be set.
func flags(p *Packet, o option) held {
	have, ok := p.flags()
	if !ok {
		return maybe("the TCP flags aren't known")
	}
	list := func(s string) []string {
		if s == "ALL" {
			return allFlags
		}
		return strings.Split(s, ",")
	}
	want, yes := list(o.arg(1)), true
	for _, f := range list(o.arg(0)) {
		yes = yes && slices.Contains(want, f) == slices.Contains(have, strings.ToLower(f))
	}
	return is(yes, o.not, "its flags are %s", strings.Join(have, ","))
}

func multiport(_ *walker, p *Packet, o option) held {
	var out held
	for _, s := range []struct {
		name, what string
		port       uint16
	}{{"--dports", "destination", p.Dst.Port()}, {"--sports", "source", p.Src.Port()}} {
		if o.name != s.name && o.name != "--ports" {
			continue
		}
		for part := range strings.SplitSeq(o.arg(0), ",") {
			h := portIn(s.port, part, false, s.what)
			if h.answer == Yes {
				return h.invert(o.not)
			}
			if out.answer != Maybe {
				out = h
			}
		}
	}
	if out.answer == "" {
		return maybe("the option %s isn't known to this program", o.name)
	}
	return out.invert(o.not)
}

// mark compares the packet's mark.
func mark(_ *walker, p *Packet, o option) held {
	value, mask, ok := masked(o.arg(0))
	if o.name != "--mark" || !ok {
		return maybe("the option %s %s isn't known to this program", o.name, o.arg(0))
	}
	return is(p.Mark&mask == value, o.not, "its mark is %#x", p.Mark)
}

// connmark compares the connection's mark.
func connmark(w *walker, p *Packet, o option) held {
	of := Packet{Mark: p.ConnMark}
	return mark(w, &of, o)
}

// masked reads "0x4000/0x4000".
func masked(s string) (value, mask uint32, ok bool) {
	v, m, has := strings.Cut(s, "/")
	a, err := strconv.ParseUint(v, 0, 32)
	b, err2 := uint64(0xffffffff), error(nil)
	if has {
		b, err2 = strconv.ParseUint(m, 0, 32)
	}
	return uint32(a), uint32(b), err == nil && err2 == nil
}

func iprange(_ *walker, p *Packet, o option) held {
	a := p.Src.Addr()
	if o.name == "--dst-range" {
		a = p.Dst.Addr()
	}
	first, last, ok := strings.Cut(o.arg(0), "-")
	lo, err := netip.ParseAddr(first)
	hi, err2 := netip.ParseAddr(last)
	if !ok || err != nil || err2 != nil || !a.IsValid() || o.name != "--src-range" && o.name != "--dst-range" {
		return maybe("the option %s %s can't be decided", o.name, o.arg(0))
	}
	return is(lo.Compare(a) <= 0 && a.Compare(hi) <= 0, o.not, "its address is %s", a)
}

// packetType: what is sent to this node, or through it, is unicast.
func packetType(_ *walker, p *Packet, o option) held {
	if !p.Dst.Addr().IsValid() || p.Dst.Addr().IsMulticast() || o.name != "--pkt-type" || p.In == "lo" || p.In == "" {
		return maybe("the kind of packet isn't known (-m pkttype)")
	}
	return is(o.arg(0) == "unicast", o.not, "it is unicast")
}

// rpfilter asks whether a packet back would leave by the same interface, which
// the caller knows.
func rpfilter(_ *walker, p *Packet, m *module) held {
	for _, o := range m.options {
		if o.name != "--invert" {
			return maybe("the option %s of rpfilter can't be decided", o.name)
		}
	}
	if p.In == "lo" {
		return is(true, len(m.options) > 0, "it comes in on the loopback")
	}
	switch p.Reversed {
	case Yes, No:
		return is(p.Reversed == Yes, len(m.options) > 0, "whether a packet back would leave by %s: %s", p.In, p.Reversed)
	}
	return maybe("whether a packet back would leave by the same interface isn't known (-m rpfilter)")
}

// statistic is a matter of chance: at random, or each n-th packet, which in the
// long run is the same (statistic_mt in net/netfilter/xt_statistic.c).
func statistic(_ *walker, _ *Packet, m *module) held {
	mode, _ := find(m.options, "--mode")
	switch mode.arg(0) {
	case "random":
		o, _ := find(m.options, "--probability")
		p, err := strconv.ParseFloat(o.arg(0), 64)
		if err == nil && p >= 0 && p <= 1 {
			return chance(p, "at random, probability "+o.arg(0)).invert(o.not)
		}
	case "nth":
		o, _ := find(m.options, "--every")
		n, err := strconv.ParseUint(o.arg(0), 10, 32)
		if err == nil && n > 0 {
			return chance(1/float64(n), fmt.Sprintf("1 of %d in turn", n)).invert(o.not)
		}
	}
	return maybe("the match statistic can't be read")
}

func chance(p float64, why string) held {
	switch {
	case p >= 1:
		return held{answer: Yes, why: why}
	case p <= 0:
		return held{answer: No, why: why}
	}
	return held{answer: Chance, chance: p, why: why}
}

// addressType asks the host for the routes to addresses.
func addressType(w *walker, p *Packet, m *module) held {
	out := held{answer: Yes}
	for _, o := range m.options {
		a, what := p.Src.Addr(), "source"
		switch o.name {
		case "--src-type":
		case "--dst-type":
			a, what = p.Dst.Addr(), "destination"
		default: // --limit-iface-in, --limit-iface-out
			out = maybe("which addresses the interface has isn't known (addrtype %s)", o.name)
			continue
		}
		if w.tables.host == nil || !a.IsValid() {
			return maybe("the type of the %s address isn't known", what)
		}
		have, err := w.tables.host.AddressType(a)
		if err != nil {
			return maybe("%v", err)
		}
		if slices.Contains(strings.Split(o.arg(0), ","), have) == o.not {
			return held{answer: No, why: fmt.Sprintf("its %s %s is %s", what, a, have)}
		}
	}
	return out
}

// socket matches what a socket of this host would receive. Of a new connection
// that is one which listens at exactly its destination: those that listen on
// every address don't count without --nowildcard (xt_socket.c).
func socket(w *walker, p *Packet, m *module) held {
	if p.State != New && p.State != Invalid && p.State != Untracked {
		return maybe("whether a socket has this connection isn't known")
	}
	if _, wild := find(m.options, "--nowildcard"); wild || w.tables.host == nil {
		return maybe("which sockets this host has isn't known")
	}
	listens, err := w.tables.host.Listens(p.Protocol, p.Dst)
	switch {
	case err != nil:
		return maybe("%v", err)
	case listens && len(m.options) > 0:
		return maybe("whether the socket at %s is transparent isn't known", p.Dst)
	}
	return is(listens, false, "no socket is bound to %s", p.Dst)
}

// owner is for what sockets of this host send; nothing else has an owner.
func owner(_ *walker, p *Packet, m *module) held {
	if p.In == "" {
		return maybe("who sends it isn't known (-m owner)")
	}
	for _, o := range m.options {
		if !o.not {
			return held{answer: No, why: "it isn't sent by this host"}
		}
	}
	return held{answer: Yes}
}

// recent remembers clients. Remembering always matches (recent_mt in
// net/netfilter/xt_recent.c).
func recent(_ *walker, _ *Packet, m *module) held {
	if o, ok := find(m.options, "--set"); ok {
		return is(true, o.not, "it is remembered")
	}
	return maybe("it depends on who came lately (-m recent)")
}

// physdev looks at ports of bridges. Where bridged packets don't pass netfilter,
// packets have none (physdev_mt in net/netfilter/xt_physdev.c).
func physdev(w *walker, _ *Packet, m *module) held {
	if w.tables.bridged != No {
		return maybe("it depends on the bridge's port (-m physdev)")
	}
	for _, o := range m.options {
		if !o.not {
			return held{answer: No, why: "bridged packets don't pass netfilter"}
		}
	}
	return held{answer: Yes}
}
