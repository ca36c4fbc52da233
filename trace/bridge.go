package trace

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// bridge is a link that packets come in by, or leave by, through one of its ports.
type bridge struct {
	under   string // the name of a link that is none, but of which packets pass it; the rest is empty then
	name    string
	mac     net.HardwareAddr
	tagged  bool // it filters VLANs: packets may have tags
	ports   []string
	learned map[string]string // the ports that hosts are behind, by the hosts' link-layer addresses
	shows   bool              // it shows packets to the hooks of IP, within its own (br_netfilter)
}

// readBridge reads a link; nil if its packets pass no bridge.
func readBridge(name string, f service.Family) *bridge {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil
	}
	a := link.Attrs()
	if link.Type() != "bridge" { // a VLAN's link, or a port
		index := a.MasterIndex
		if index == 0 && a.NetNsID < 0 {
			index = a.ParentIndex
		}
		if other, err := netlink.LinkByIndex(index); err == nil && other.Type() == "bridge" {
			return &bridge{name: other.Attrs().Name, under: name}
		}
		return nil
	}
	b := &bridge{name: name, mac: a.HardwareAddr, learned: map[string]string{}, shows: kernel.BridgeCallsNetfilter(f)}
	if filters := link.(*netlink.Bridge).VlanFiltering; filters != nil {
		b.tagged = *filters
	}
	names := map[int]string{}
	links, _ := netlink.LinkList()
	for _, l := range links {
		if l.Attrs().MasterIndex == a.Index {
			names[l.Attrs().Index] = l.Attrs().Name
			b.ports = append(b.ports, l.Attrs().Name)
		}
	}
	entries, _ := netlink.NeighList(0, unix.AF_BRIDGE)
	for _, n := range entries {
		if port := names[n.LinkIndex]; port != "" && n.MasterIndex == a.Index {
			b.learned[n.HardwareAddr.String()] = port
		}
	}
	return b
}

// bridge returns a link that is a bridge; nil for another. It notes where packets pass one, and aren't followed there.
func (t *tracer) bridge(link string) *bridge {
	b, read := t.bridges[link]
	if !read && link != "" {
		if b = t.host.bridge(link); b != nil && b.under != "" {
			t.warn(SeverityNote, fmt.Sprintf("packets of link %s pass bridge %s: what chains of bridges and of their ports do to them isn't followed", link, b.name), "link "+link, "nft list ruleset shows them")
			b = nil
		}
		t.bridges[link] = b
	}
	return b
}

// port returns the port of a bridge that a host, or the router to it, is behind, and that one's link-layer address, which is empty
// where it isn't known.
func (t *tracer) port(b *bridge, host netip.Addr) (name, mac string) {
	if g := t.guest(host); g != nil && g.by == b.name && g.peer != b.name {
		return g.peer, g.mac
	}
	if name = netfilter.UnknownPort; len(b.ports) == 1 {
		name = b.ports[0]
	}
	if !host.IsValid() {
		return name, ""
	}
	if r := t.host.route(query{to: host}); r.link == b.name {
		if h, err := t.host.hop(&r); err == nil {
			address, _ := net.ParseMAC(h.mac)
			return cmp.Or(b.learned[h.mac], name), string(address)
		}
	}
	return name, ""
}

// crossing is a hook of a bridge that a packet passes.
type crossing struct {
	hook    netfilter.Hook
	span    netfilter.Span
	in, out string // ports
	frame   netfilter.Frame
	unsure  bool // whether its destination has been translated isn't known
}

// enter returns a packet as a bridge's rules see it.
func (c *crossing) enter(p netfilter.Packet) netfilter.Packet {
	if p.In, p.Out, p.Frame = c.in, c.out, c.frame; c.unsure {
		p.Dst = netip.AddrPort{}
	}
	return p
}

// leave returns a packet as it is behind the bridge's rules, where was is what entered.
func (c *crossing) leave(p netfilter.Packet, was *netfilter.Packet) netfilter.Packet {
	if p.In, p.Out, p.Frame = was.In, was.Out, was.Frame; c.unsure {
		p.Dst = was.Dst
	}
	return p
}

// cross takes a way through hooks of bridges.
func (t *tracer) cross(w way, all []crossing, goOn func(way)) {
	if len(all) == 0 {
		goOn(w)
		return
	}
	was := w.packet
	w.packet = all[0].enter(was)
	t.passHook(w, all[0].hook, all[0].span, func(w way) {
		w.packet = all[0].leave(w.packet, &was)
		t.cross(w, all[1:], goOn)
	})
}

// crossings lists the hooks of bridges that a packet passes before hook h of IP, or behind it, where was is how it came there; nil is
// before (br_handle_frame, br_pass_frame_up, __br_forward). A bridge that shows packets to the hooks of IP calls PREROUTING within
// its own, and the others too if the packet is bridged (net/bridge/br_netfilter_hooks.c).
func (t *tracer) crossings(p, was *netfilter.Packet, h netfilter.Hook) []crossing {
	in, out, behind := t.bridge(p.In), t.bridge(p.Out), was != nil
	came := p
	if behind {
		came = was
	}
	bridged := t.bridged(came, p.Out)
	switch {
	case h == netfilter.Prerouting && in != nil:
		c := crossing{hook: h, span: netfilter.Whole, frame: netfilter.Frame{Bridge: in.name, Dst: string(in.mac), Tagged: in.tagged}}
		c.in, c.frame.Src = t.port(in, p.Src.Addr())
		if t.host.addresses.together(in.name, p.Src.Addr(), came.Dst.Addr()) && !t.host.local(came.Dst.Addr()) {
			_, c.frame.Dst = t.port(in, came.Dst.Addr())
		}
		input, late := c, c
		input.hook = netfilter.Input
		switch {
		case behind && !in.shows:
			return nil
		case behind:
			c.span, late.span = netfilter.BridgeWithIP, netfilter.BridgeAfterIP
			c.unsure = came.Dst != p.Dst && t.fates(&c, *p) != t.fates(&c, *came)
			if r := t.host.route(t.host.query(p)); !t.bridged(p, r.link) {
				return []crossing{c, late, input}
			}
			return []crossing{c, late}
		case in.shows:
			c.span = netfilter.BridgeBeforeIP
			return []crossing{c}
		}
		return []crossing{c, input}
	case bridged && !behind && (h == netfilter.Forward || h == netfilter.Postrouting):
		c := crossing{hook: h, span: netfilter.Whole, frame: netfilter.Frame{Bridge: in.name, Tagged: in.tagged}}
		if c.out, c.frame.Dst = t.port(in, p.Dst.Addr()); h == netfilter.Forward {
			c.in, _ = t.port(in, p.Src.Addr())
		}
		return []crossing{c}
	case h == netfilter.Postrouting && out != nil && !bridged && behind:
		c := crossing{hook: netfilter.Output, span: netfilter.Whole, frame: netfilter.Frame{Bridge: out.name, Src: string(out.mac), Tagged: out.tagged}}
		c.out, c.frame.Dst = t.port(out, p.Dst.Addr())
		late := c
		late.hook = h
		return []crossing{c, late}
	}
	return nil
}

// bridged reports whether a packet that came in by a bridge goes to another of its ports without being routed: where the hooks of
// IP have given it a destination there (br_nf_pre_routing_finish), or its sender reaches that without a router.
func (t *tracer) bridged(p *netfilter.Packet, out string) bool {
	in := t.bridge(p.In)
	changed := p.DNAT && !p.Reply || p.SNAT && p.Reply
	return in != nil && out == p.In && in.shows && (changed || t.host.addresses.together(out, p.Src.Addr(), p.Dst.Addr()))
}

// fates says what a hook of a bridge makes of a packet.
func (t *tracer) fates(c *crossing, p netfilter.Packet) (out string) {
	for _, o := range t.host.walk(c.enter(p), c.hook, c.span).Outcomes {
		out += fmt.Sprint(o.Verdict, o.Packet.Mark, o.Probability, o.Certain, ";")
	}
	return out
}
