package netfilter

import (
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// Packet holds what rules look at: the first packet of a connection, unless State
// says otherwise. It is a comparable value; walking returns changed copies.
type Packet struct {
	Protocol service.Protocol
	// Src and Dst are as in the packet now. A source port of 0 is one that the
	// caller doesn't know; rules that look at it are undecided then, so better
	// choose one as a client would. An invalid address is unknown as well.
	Src, Dst netip.AddrPort
	// In and Out are the interfaces; empty for none (a packet of this node's own
	// has no In).
	In, Out string
	// Frame is what it is in where it passes a bridge; In and Out are ports there.
	Frame Frame

	// TTL is the hop limit too. 0 says that it isn't known, of MSS as well: a host that is farther away sends what
	// Linux does, but which of it arrives hangs on what is between.
	TTL byte
	TOS byte   // or traffic class; 0 as Linux sends it
	MSS uint16 // that TCP offers

	Mark     uint32
	ConnMark uint32 // of its connection

	State State
	// Zone is conntrack's, in which its connection is looked up.
	Zone Zone
	// Reply says that it is the connection's first answer.
	Reply bool
	// Later says that it is the client's first packet behind that answer: of TCP, its ACK.
	Later bool
	// Data says that the packet carries some, so that its length isn't known.
	Data bool
	// OrigSrc and OrigDst are the addresses of the connection's original
	// direction, before any rewriting.
	OrigSrc, OrigDst netip.AddrPort
	// DNAT and SNAT say that the connection's destination or source was rewritten:
	// conntrack's status of that name.
	DNAT, SNAT bool
	// DstDone and SrcDone say that the nat chains have decided about the
	// connection's destination (PREROUTING or OUTPUT) and source (POSTROUTING or
	// INPUT), whatever they decided: no other nat chain of that kind sees it
	// (nf_nat_inet_fn in net/netfilter/nf_nat_core.c).
	DstDone, SrcDone bool
	// Redirected says that the new destination is this node: by REDIRECT, or
	// kproxy's listener.
	Redirected bool
	// Unnamed says that its sender is a user and a group that no rule names; who sends a packet
	// isn't known otherwise.
	Unnamed bool
	// Holder is the socket of this host that the packet's connection belongs to, of an answer; none of one that is forwarded.
	Holder Socket
	// Socket is where a TPROXY rule delivers the packet.
	Socket netip.AddrPort
	// Priority is the packet's, if a rule has set it.
	Priority    uint32
	PrioritySet bool
	added       storing
	remembered  string // names of lists of iptables' match recent
	stripped    uint32 // bits of options of TCP that rules have made padding
	// Reversed says whether a packet back to the source would leave by In, for
	// the match rpfilter.
	Reversed Answer
}

// Frame is one of Ethernet on its way through a bridge, where the bridge's hooks are met and not those of IP.
type Frame struct {
	Bridge   string // empty where the packet passes none
	Src, Dst string // addresses of six bytes; empty where they aren't known
	Tagged   bool   // it may have a VLAN's tag
}

// UnknownPort is a port of a bridge, and which one isn't known.
const UnknownPort = "?"

// looped reports whether this node has sent the packet to itself: conntrack confirmed its connection on the way
// out, at POSTROUTING (nf_confirm).
func (p *Packet) looped() bool { return p.In == "lo" }

// State is conntrack's state of a packet.
type State string

// The states (enum ip_conntrack_info).
const (
	New         State = "NEW"
	Established State = "ESTABLISHED"
	Related     State = "RELATED"
	Invalid     State = "INVALID"
	Untracked   State = "UNTRACKED"
)

// Zone is a zone of conntrack; the zero value is that of all packets for which no rule says another one.
type Zone struct {
	ID  uint16
	Way string // the one direction, "original" or "reply", that it is for; empty for both
}

// in returns the zone that a connection's entry for one direction is in (nf_ct_zone_id in include/net/netfilter/nf_conntrack_zones.h).
func (z Zone) in(way string) uint16 {
	if z.Way != "" && z.Way != way {
		return 0
	}
	return z.ID
}

// Finds reports whether conntrack finds the connection of a later packet in zone z, where the connection's first one
// was in zone first (resolve_normal_ct in net/netfilter/nf_conntrack_core.c).
func (z Zone) Finds(first Zone, reply bool) bool {
	entry := first.in("original")
	if reply {
		entry = first.in("reply")
	}
	return z.in("original") == entry || z.in("reply") == entry
}

// Answer says what is certain about a question.
type Answer string

// The answers; empty is Maybe.
const (
	Yes   Answer = "yes"
	No    Answer = "no"
	Maybe Answer = "maybe"
	// Chance is yes with a probability that the rule gives.
	Chance Answer = "chance"
)

// NewPacket is the first packet of a connection: of TCP, its SYN. It comes in on
// the interface in; empty for one of this node's own. It is as Linux sends it, but for what [Packet.Near] fills in.
func NewPacket(proto service.Protocol, src, dst netip.AddrPort, in string) Packet {
	return Packet{Protocol: proto, Src: src, Dst: dst, OrigSrc: src, OrigDst: dst, In: in, State: New}
}

// direction is conntrack's word for it.
func (p *Packet) direction() string {
	if p.Reply {
		return "reply"
	}
	return "original"
}

// Family is the packet's address family.
func (p *Packet) Family() service.Family { return service.FamilyOf(p.OrigDst.Addr()) }
