package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// Message types of ctnetlink; the subsystem (NFNL_SUBSYS_CTNETLINK) is in the
// upper byte.
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK << 8
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// The numbers of linux/netfilter/nfnetlink_conntrack.h that are used here.
const (
	ctaTupleOrig     = 1
	ctaTupleReply    = 2
	ctaStatus        = 3
	ctaProtoInfo     = 4
	ctaNATSrc        = 6
	ctaTimeout       = 7
	ctaMark          = 8
	ctaCountersOrig  = 9
	ctaCountersReply = 10
	ctaID            = 12
	ctaNATDst        = 13
	ctaZone          = 18
	ctaTimestamp     = 20
	ctaFilter        = 25
	ctaStatusMask    = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaProtoInfoTCP           = 1
	ctaProtoInfoTCPState      = 1
	ctaProtoInfoTCPFlagsOrig  = 4
	ctaProtoInfoTCPFlagsReply = 5

	ctaCountersPackets = 1
	ctaCountersBytes   = 2

	ctaTimestampStart = 1

	ctaNATv4Min        = 1
	ctaNATv4Max        = 2
	ctaNATProto        = 3
	ctaNATv6Min        = 4
	ctaNATv6Max        = 5
	ctaProtoNATPortMin = 1
	ctaProtoNATPortMax = 2

	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2
	// These are CTA_FILTER_F_CTA_IP_SRC, _PROTO_NUM and _PROTO_SRC_PORT of the kernel's
	// net/netfilter/nf_internals.h: not exported, but part of the interface.
	filterIPSrc        = 1 << 0
	filterProtoNum     = 1 << 3
	filterProtoSrcPort = 1 << 4
)

// appendHeader appends struct nfgenmsg.
func appendHeader(b []byte, f service.Family) []byte {
	return netlink.AppendNetfilter(b, f.Number())
}

func appendTuple(b []byte, typ uint16, p service.Protocol, src, dst netip.AddrPort) []byte {
	srcType, dstType := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if src.Addr().Is6() {
		srcType, dstType = ctaIPv6Src, ctaIPv6Dst
	}
	return netlink.AppendNested(b, typ, func(b []byte) []byte {
		b = netlink.AppendNested(b, ctaTupleIP, func(b []byte) []byte {
			b = netlink.AppendAddr(b, srcType, src.Addr())
			return netlink.AppendAddr(b, dstType, dst.Addr())
		})
		return netlink.AppendNested(b, ctaTupleProto, func(b []byte) []byte {
			b = netlink.Append(b, ctaProtoNum, byte(p))
			b = netlink.AppendUint16(b, ctaProtoSrcPort, src.Port())
			return netlink.AppendUint16(b, ctaProtoDstPort, dst.Port())
		})
	})
}

// appendGet asks for the entry whose answers go from src to dst.
func appendGet(b []byte, p service.Protocol, src, dst netip.AddrPort) []byte {
	b = appendHeader(netlink.AppendRequest(b, messageGet, 0), service.FamilyOf(src.Addr()))
	return appendTuple(b, ctaTupleReply, p, src, dst)
}

// appendDelete deletes the entry with f's original tuple, if it still is f: the
// kernel compares the ID.
func appendDelete(b []byte, f *Flow) []byte {
	b = appendHeader(netlink.AppendRequest(b, messageDelete, unix.NLM_F_ACK), f.Family)
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.OrigSrc, f.OrigDst)
	return netlink.AppendUint32(b, ctaID, f.ID)
}

// restoredTimeout is how long a restored entry lives when no packet comes, from
// which on it has the time-out of its state again. It may well end before the
// connection does: then it is restored once more.
const restoredTimeout = 10 * time.Minute

// tcpLiberal is IP_CT_TCP_FLAG_BE_LIBERAL: no packet is out of a window that
// the kernel doesn't know.
const tcpLiberal = 0x08

// appendRestore makes an entry as it is before any translation, and lets the
// kernel translate it: only so does it note that there is something to
// translate (nf_nat_setup_info in nf_nat_core.c).
func appendRestore(b []byte, f *Flow) []byte {
	b = netlink.AppendRequest(b, messageNew, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	b = appendHeader(b, f.Family)
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.OrigSrc, f.OrigDst)
	b = appendTuple(b, ctaTupleReply, f.Protocol, f.OrigDst, f.OrigSrc)
	b = appendTranslation(b, ctaNATDst, f.ReplySrc)
	// Also where it stays the same: the kernel would give the client another port
	// if an answer's entry is in the way.
	b = appendTranslation(b, ctaNATSrc, f.ReplyDst)
	b = netlink.AppendUint32(b, ctaStatus, statusSeenReply|statusAssured|statusConfirmed)
	b = netlink.AppendUint32(b, ctaTimeout, uint32(restoredTimeout/time.Second))
	if f.Mark != 0 {
		b = netlink.AppendUint32(b, ctaMark, f.Mark)
	}
	if f.Protocol != service.TCP {
		return b
	}
	state := f.TCPState
	if state < tcpEstablished || state > tcpLastAck { // the connection isn't there yet, or is over
		state = tcpEstablished
	}
	return netlink.AppendNested(b, ctaProtoInfo, func(b []byte) []byte {
		return netlink.AppendNested(b, ctaProtoInfoTCP, func(b []byte) []byte {
			b = netlink.Append(b, ctaProtoInfoTCPState, state)
			// struct nf_ct_tcp_flags: flags, then which of them are meant.
			b = netlink.Append(b, ctaProtoInfoTCPFlagsOrig, tcpLiberal, tcpLiberal)
			return netlink.Append(b, ctaProtoInfoTCPFlagsReply, tcpLiberal, tcpLiberal)
		})
	})
}

// appendTranslation appends the one address and port to translate to.
func appendTranslation(b []byte, typ uint16, to netip.AddrPort) []byte {
	lowest, highest := uint16(ctaNATv4Min), uint16(ctaNATv4Max)
	if to.Addr().Is6() {
		lowest, highest = ctaNATv6Min, ctaNATv6Max
	}
	return netlink.AppendNested(b, typ, func(b []byte) []byte {
		b = netlink.AppendAddr(b, lowest, to.Addr())
		b = netlink.AppendAddr(b, highest, to.Addr())
		return netlink.AppendNested(b, ctaNATProto, func(b []byte) []byte {
			b = netlink.AppendUint16(b, ctaProtoNATPortMin, to.Port())
			return netlink.AppendUint16(b, ctaProtoNATPortMax, to.Port())
		})
	})
}

// appendDump asks for all entries of a family, AF_UNSPEC for both, and lets the kernel leave out what
// w doesn't take: other protocols of one family since Linux 5.8, by status since 5.15. Older ones
// ignore that.
func appendDump(b []byte, family byte, w Wanted) []byte {
	b = appendTuples(netlink.AppendNetfilter(netlink.AppendRequest(b, messageGet, unix.NLM_F_DUMP), family), family, w)
	if w.Unanswered {
		b = appendStatus(b, 0, statusSeenReply)
	}
	return b
}

// appendDeleteUnanswered deletes the TCP entries that DNAT has led to an IPv4 endpoint, outside zones, and of which no answer has come. Linux before 6.11
// can't filter what it deletes: it looks for one entry then, and refuses a tuple that has no destination (ctnetlink_del_conntrack).
func appendDeleteUnanswered(b []byte, endpoint netip.AddrPort) []byte {
	b = netlink.AppendNetfilter(netlink.AppendRequest(b, messageDelete, unix.NLM_F_ACK), unix.AF_INET)
	b = appendTuples(b, unix.AF_INET, Wanted{Protocol: service.TCP, From: endpoint})
	b = netlink.AppendUint16(b, ctaZone, 0)
	return appendStatus(b, statusDstNAT, statusDstNAT|statusSeenReply)
}

// appendTuples appends by which protocol and source of answers the kernel filters.
func appendTuples(b []byte, family byte, w Wanted) []byte {
	if w.From.IsValid() {
		flags := uint32(filterProtoNum | filterProtoSrcPort)
		v4 := w.From.Addr().Is4()
		if v4 { // of IPv6, the kernel leaves out what is equal (ctnetlink_filter_match_tuple has ipv6_addr_cmp the wrong way round)
			flags |= filterIPSrc
		}
		b = netlink.AppendNested(b, ctaTupleReply, func(b []byte) []byte {
			if v4 {
				b = netlink.AppendNested(b, ctaTupleIP, func(b []byte) []byte { return netlink.AppendAddr(b, ctaIPv4Src, w.From.Addr()) })
			}
			return netlink.AppendNested(b, ctaTupleProto, func(b []byte) []byte {
				return netlink.AppendUint16(netlink.Append(b, ctaProtoNum, byte(w.Protocol)), ctaProtoSrcPort, w.From.Port())
			})
		})
		b = netlink.AppendNested(b, ctaFilter, func(b []byte) []byte {
			return netlink.AppendNative(b, ctaFilterReplyFlags, flags)
		})
	} else if w.Protocol != 0 && family != unix.AF_UNSPEC {
		b = netlink.AppendNested(b, ctaTupleOrig, func(b []byte) []byte {
			return netlink.AppendNested(b, ctaTupleProto, func(b []byte) []byte { return netlink.Append(b, ctaProtoNum, byte(w.Protocol)) })
		})
		b = netlink.AppendNested(b, ctaFilter, func(b []byte) []byte { return netlink.AppendNative(b, ctaFilterOrigFlags, filterProtoNum) })
	}
	return b
}

// appendStatus appends the status by which the kernel filters, and which of its bits are meant.
func appendStatus(b []byte, status, mask uint32) []byte {
	return netlink.AppendUint32(netlink.AppendUint32(b, ctaStatus, status), ctaStatusMask, mask)
}

// inside returns the attribute of one type that is in b; nil if there is none.
func inside(b []byte, wanted uint16) (found []byte) {
	for typ, value := range netlink.Attributes(b) {
		if typ == wanted {
			found = value
		}
	}
	return found
}

// decode decodes the body of a ctnetlink message: an answer, an entry of a
// dump, or an event. It accepts any bytes, and attributes that it doesn't know; what is cut short is left out.
func decode(b []byte) (f Flow, err error) {
	if len(b) < netlink.SizeofNetfilter {
		return f, errors.New("decode conntrack entry: it is cut short")
	}
	switch b[0] {
	case unix.AF_INET:
		f.Family = service.IPv4
	case unix.AF_INET6:
		f.Family = service.IPv6
	default:
		return f, fmt.Errorf("decode conntrack entry: unknown address family %d", b[0])
	}
	for typ, b := range netlink.Attributes(b[netlink.SizeofNetfilter:]) {
		switch typ {
		case ctaTupleOrig:
			f.OrigSrc, f.OrigDst = f.tuple(b)
		case ctaTupleReply:
			f.ReplySrc, f.ReplyDst = f.tuple(b)
		case ctaStatus:
			f.Status = number[uint32](b)
		case ctaMark:
			f.Mark = number[uint32](b)
		case ctaID:
			f.ID = number[uint32](b)
		case ctaTimeout:
			f.Timeout = time.Duration(number[uint32](b)) * time.Second
		case ctaZone:
			f.Zone = number[uint16](b)
		case ctaCountersOrig:
			f.OrigPackets, f.OrigBytes = counters(b)
		case ctaCountersReply:
			f.ReplyPackets, f.ReplyBytes = counters(b)
		case ctaProtoInfo:
			f.TCPState = number[uint8](inside(inside(b, ctaProtoInfoTCP), ctaProtoInfoTCPState))
		case ctaTimestamp:
			f.Start = time.Unix(0, int64(number[uint64](inside(b, ctaTimestampStart))))
		}
	}
	if !f.OrigSrc.IsValid() && !f.ReplySrc.IsValid() {
		return f, fmt.Errorf("decode conntrack entry: it has no %s addresses", f.Family)
	}
	return f, nil
}

// tuple reads source and destination, and notes the protocol.
func (f *Flow) tuple(b []byte) (src, dst netip.AddrPort) {
	var srcAddr, dstAddr netip.Addr
	for typ, b := range netlink.Attributes(inside(b, ctaTupleIP)) {
		switch typ {
		case ctaIPv4Src, ctaIPv6Src:
			srcAddr = f.address(b)
		case ctaIPv4Dst, ctaIPv6Dst:
			dstAddr = f.address(b)
		}
	}
	var srcPort, dstPort uint16
	for typ, b := range netlink.Attributes(inside(b, ctaTupleProto)) {
		switch typ {
		case ctaProtoNum:
			f.Protocol = service.Protocol(number[uint8](b))
		case ctaProtoSrcPort:
			srcPort = number[uint16](b)
		case ctaProtoDstPort:
			dstPort = number[uint16](b)
		}
	}
	return netip.AddrPortFrom(srcAddr, srcPort), netip.AddrPortFrom(dstAddr, dstPort)
}

// address returns an address of the flow's family; the zero Addr for any other.
func (f *Flow) address(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	if a.BitLen() != f.Family.Bits() {
		return netip.Addr{}
	}
	return a
}

func counters(b []byte) (packets, bytes uint64) {
	return number[uint64](inside(b, ctaCountersPackets)), number[uint64](inside(b, ctaCountersBytes))
}

// number reads a number in network order, which ctnetlink has, unlike the rest of
// netlink; 0 where b has less bytes.
func number[T uint8 | uint16 | uint32 | uint64](b []byte) T {
	size := int(unsafe.Sizeof(T(0)))
	if len(b) < size {
		return 0
	}
	var n uint64
	for _, c := range b[:size] {
		n = n<<8 | uint64(c)
	}
	return T(n)
}
