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
	b = netlink.AppendNetfilter(netlink.AppendRequest(b, messageGet, unix.NLM_F_DUMP), family)
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
	if w.Unanswered || w.Answered { // a value and which bits it is about
		b = netlink.AppendUint32(b, ctaStatus, map[bool]uint32{true: statusSeenReply}[w.Answered])
		b = netlink.AppendUint32(b, ctaStatusMask, statusSeenReply)
	}
	return b
}

var errShort = errors.New("attribute is cut short")

// each calls f with every attribute of b.
func each(b []byte, f func(typ uint16, value []byte) error) error {
	for {
		typ, value, rest, ok := netlink.Next(b)
		if !ok && len(rest) > 0 {
			return errShort
		}
		if !ok {
			return nil
		}
		if err := f(typ, value); err != nil {
			return err
		}
		b = rest
	}
}

// inside calls f with the attribute of one type that is in b.
func inside(b []byte, wanted uint16, f func(value []byte) error) error {
	return each(b, func(typ uint16, value []byte) error {
		if typ != wanted {
			return nil
		}
		return f(value)
	})
}

// decode decodes the body of a ctnetlink message: an answer, an entry of a
// dump, or an event. It accepts any bytes, and attributes that it doesn't know.
func decode(b []byte) (f Flow, err error) {
	err = errShort
	if len(b) >= netlink.SizeofNetfilter {
		switch b[0] {
		case unix.AF_INET:
			f.Family = service.IPv4
		case unix.AF_INET6:
			f.Family = service.IPv6
		default:
			return f, fmt.Errorf("decode conntrack entry: unknown address family %d", b[0])
		}
		err = each(b[netlink.SizeofNetfilter:], f.attribute)
	}
	if err != nil {
		err = fmt.Errorf("decode conntrack entry: %w", err)
	}
	return f, err
}

func (f *Flow) attribute(typ uint16, b []byte) error {
	var seconds uint32
	switch typ {
	case ctaTupleOrig:
		return f.tuple(b, &f.OrigSrc, &f.OrigDst)
	case ctaTupleReply:
		return f.tuple(b, &f.ReplySrc, &f.ReplyDst)
	case ctaStatus:
		return number(b, &f.Status)
	case ctaMark:
		return number(b, &f.Mark)
	case ctaID:
		return number(b, &f.ID)
	case ctaTimeout:
		err := number(b, &seconds)
		f.Timeout = time.Duration(seconds) * time.Second
		return err
	case ctaZone:
		return number(b, &f.Zone)
	case ctaCountersOrig:
		return counters(b, &f.OrigPackets, &f.OrigBytes)
	case ctaCountersReply:
		return counters(b, &f.ReplyPackets, &f.ReplyBytes)
	case ctaProtoInfo:
		return inside(b, ctaProtoInfoTCP, func(b []byte) error {
			return inside(b, ctaProtoInfoTCPState, func(b []byte) error { return number(b, &f.TCPState) })
		})
	case ctaTimestamp:
		return inside(b, ctaTimestampStart, func(b []byte) error {
			var nanoseconds uint64
			err := number(b, &nanoseconds)
			f.Start = time.Unix(0, int64(nanoseconds))
			return err
		})
	}
	return nil
}

// tuple reads source and destination, and notes the protocol.
func (f *Flow) tuple(b []byte, src, dst *netip.AddrPort) error {
	var srcAddr, dstAddr netip.Addr
	var srcPort, dstPort uint16
	err := each(b, func(typ uint16, b []byte) error {
		switch typ {
		case ctaTupleIP:
			return each(b, func(typ uint16, b []byte) error {
				switch typ {
				case ctaIPv4Src, ctaIPv6Src:
					return f.address(b, &srcAddr)
				case ctaIPv4Dst, ctaIPv6Dst:
					return f.address(b, &dstAddr)
				}
				return nil
			})
		case ctaTupleProto:
			return each(b, func(typ uint16, b []byte) error {
				switch typ {
				case ctaProtoNum:
					return number(b, (*uint8)(&f.Protocol))
				case ctaProtoSrcPort:
					return number(b, &srcPort)
				case ctaProtoDstPort:
					return number(b, &dstPort)
				}
				return nil
			})
		}
		return nil
	})
	*src, *dst = netip.AddrPortFrom(srcAddr, srcPort), netip.AddrPortFrom(dstAddr, dstPort)
	return err
}

func (f *Flow) address(b []byte, a *netip.Addr) (err error) {
	var ok bool
	if *a, ok = netip.AddrFromSlice(b); !ok || a.BitLen() != f.Family.Bits() {
		err = fmt.Errorf("%d bytes are no %s address", len(b), f.Family)
		*a = netip.Addr{}
	}
	return err
}

func counters(b []byte, packets, bytes *uint64) error {
	return each(b, func(typ uint16, b []byte) error {
		switch typ {
		case ctaCountersPackets:
			return number(b, packets)
		case ctaCountersBytes:
			return number(b, bytes)
		}
		return nil
	})
}

// number reads a number in network order, which ctnetlink has, unlike the rest of
// netlink.
func number[T uint8 | uint16 | uint32 | uint64](b []byte, to *T) error {
	size := int(unsafe.Sizeof(*to))
	if len(b) < size {
		return errShort
	}
	var n uint64
	for _, c := range b[:size] {
		n = n<<8 | uint64(c)
	}
	*to = T(n)
	return nil
}
