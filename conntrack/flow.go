package conntrack

import (
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/service"
)

// Flow is one entry of the table. Its original tuple is what the client sent;
// its reply tuple is what an answer looks like to the kernel before it is
// translated back, so ReplySrc is where packets really go.
type Flow struct {
	Family   service.Family
	Protocol service.Protocol

	OrigSrc, OrigDst   netip.AddrPort // ports are 0 for protocols without
	ReplySrc, ReplyDst netip.AddrPort

	// Counters are 0 unless accounting is on. Bytes include the IP headers.
	OrigPackets, OrigBytes   uint64 // from client to endpoint
	ReplyPackets, ReplyBytes uint64 // back

	Mark     uint32
	Status   uint32 // IPS_* bits of linux/netfilter/nf_conntrack_common.h
	Timeout  time.Duration
	ID       uint32    // the kernel's, a hash of the entry's tuples and its place in memory
	Zone     uint16    // 0 unless another program divides the table
	TCPState uint8     // TCP_CONNTRACK_* of linux/netfilter/nf_conntrack_tcp.h
	Start    time.Time // zero unless nf_conntrack_timestamp is on
}

// Bits of a flow's status.
const (
	statusSeenReply = 1 << 1 // IPS_SEEN_REPLY
	statusAssured   = 1 << 2 // IPS_ASSURED: not the first to go when the table is full
	statusConfirmed = 1 << 3 // IPS_CONFIRMED, which every entry has, and which may not differ (ctnetlink_change_status)
	statusDstNAT    = 1 << 5 // IPS_DST_NAT
)

// States of TCP entries. Those before tcpEstablished carry nothing yet, those from
// tcpTimeWait on nothing any more.
const (
	tcpSynSent     = 1
	tcpSynRecv     = 2
	tcpEstablished = 3
	tcpLastAck     = 6
	tcpTimeWait    = 7
	tcpClose       = 8
)

// Rewritten reports whether the destination was rewritten (DNAT, REDIRECT or
// IPVS). It compares tuples, because events don't always carry the status.
func (f *Flow) Rewritten() bool { return f.ReplySrc != f.OrigDst }

// DestinationNAT reports whether it was a rule that rewrote the destination
// (DNAT, REDIRECT). IPVS alters the reply tuple without a word in the status
// (ip_vs_update_conntrack in ip_vs_nfct.c), so a rewritten flow without it is
// IPVS's. Only lists tell it.
func (f *Flow) DestinationNAT() bool { return f.Status&statusDstNAT != 0 }

// Answered reports whether packets have come back.
func (f *Flow) Answered() bool { return f.Status&statusSeenReply != 0 }

// Open reports whether the connection can still carry data. The kernel keeps
// an entry for minutes after a TCP connection has ended.
func (f *Flow) Open() bool {
	return f.Protocol != service.TCP || f.TCPState != tcpTimeWait && f.TCPState != tcpClose
}

// Opening reports whether a TCP connection is still being made.
func (f *Flow) Opening() bool {
	return f.Protocol == service.TCP && (f.TCPState == tcpSynSent || f.TCPState == tcpSynRecv)
}

// Failed reports, of a flow that isn't opening, whether no endpoint took it: a TCP
// connection to which nothing came back, or a reset alone. That is known by counting
// packets; where accounting is off, none is known to have failed. Of other protocols
// a silent endpoint may have nothing to say.
func (f *Flow) Failed() bool {
	return f.Protocol == service.TCP && f.OrigPackets > 0 && (f.ReplyPackets == 0 || f.Refused())
}

// Refused reports whether the endpoint of a TCP connection that has ended answered the
// first SYN with a reset: one packet each way, and conntrack forgets it at once
// (nf_conntrack_tcp_packet in nf_conntrack_proto_tcp.c).
func (f *Flow) Refused() bool {
	return f.Protocol == service.TCP && f.OrigPackets == 1 && f.ReplyPackets == 1
}

// CutShort reports whether f, which has ended, may be in use by both ends all
// the same: it was deleted, or a half-closed connection kept still for longer
// than its state allows. What ends a flow in the ordinary way leaves a TCP entry
// in a closed state, and a UDP entry without time left.
//
// Linux before 5.9 doesn't tell the state and the time of what has ended: there,
// every TCP flow may have been cut short, and no UDP flow is known to be.
func (f *Flow) CutShort() bool {
	switch f.Protocol {
	case service.TCP:
		return f.TCPState == 0 || f.TCPState >= tcpEstablished && f.TCPState <= tcpLastAck
	case service.UDP:
		return f.Timeout > 0
	}
	return false
}

// How long the kernel remembers a TCP connection after its end, unless it is told otherwise
// (nf_conntrack_tcp_timeout_time_wait and _close), and one whose first packet hasn't been answered (_syn_sent).
const (
	timeWait    = 2 * time.Minute
	closeWait   = 10 * time.Second
	synSentWait = 2 * time.Minute
)

// Lingered returns how long ago the last packet came of a TCP connection that is closed or that hasn't been answered yet, by the
// time that is left of the kernel's default for its state. An entry that is gone has no time left.
func (f *Flow) Lingered() time.Duration {
	var full time.Duration
	switch {
	case f.Protocol != service.TCP || f.Refused():
	case f.TCPState == tcpTimeWait:
		full = timeWait
	case f.TCPState == tcpClose:
		full = closeWait
	case f.TCPState == tcpSynSent:
		full = synSentWait
	}
	return max(full-f.Timeout, 0)
}

// Reset reports whether a TCP connection was ended by a reset.
func (f *Flow) Reset() bool { return f.Protocol == service.TCP && f.TCPState == tcpClose }

// String shows the flow as "udp 10.1.0.2:5000 > 10.96.0.10:53 = 10.2.0.2:9000".
func (f Flow) String() string {
	return fmt.Sprintf("%s %s > %s = %s", f.Protocol, f.OrigSrc, f.OrigDst, f.ReplySrc)
}

// identity names an entry for as long as it lives. A later entry with the same
// tuples has another ID unless the kernel puts it in the same place.
type identity struct {
	id       uint32
	protocol service.Protocol
	src, dst netip.AddrPort
}

// Key returns a comparable value that names the entry for as long as it lives.
func (f *Flow) Key() any { return f.identity() }

func (f *Flow) identity() identity { return identity{f.ID, f.Protocol, f.OrigSrc, f.OrigDst} }
