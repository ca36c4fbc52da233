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
	Zone     uint16    // 0 unless somebody divides the table
	TCPState uint8     // TCP_CONNTRACK_* of linux/netfilter/nf_conntrack_tcp.h
	Start    time.Time // zero unless nf_conntrack_timestamp is on
}

// Bits of a flow's status: IPS_SEEN_REPLY and IPS_DST_NAT.
const (
	statusSeenReply = 1 << 1
	statusDstNAT    = 1 << 5
)

// States of TCP entries that carry nothing any more.
const (
	tcpTimeWait = 7
	tcpClose    = 8
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

func (f *Flow) identity() identity { return identity{f.ID, f.Protocol, f.OrigSrc, f.OrigDst} }
