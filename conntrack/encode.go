package conntrack

import (
	"encoding/binary"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// Message types of ctnetlink; the subsystem (NFNL_SUBSYS_CTNETLINK) is in the
// upper byte.
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK << 8
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// appendHeader appends struct nfgenmsg.
func appendHeader(b []byte, f service.Family) []byte {
	family := byte(unix.AF_INET)
	if f == service.IPv6 {
		family = unix.AF_INET6
	}
	return append(b, family, unix.NFNETLINK_V0, 0, 0)
}

func appendTuple(b []byte, typ uint16, p service.Protocol, src, dst netip.AddrPort) []byte {
	srcType, dstType := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if src.Addr().Is6() {
		srcType, dstType = ctaIPv6Src, ctaIPv6Dst
	}
	return appendNested(b, typ, func(b []byte) []byte {
		b = appendNested(b, ctaTupleIP, func(b []byte) []byte {
			b = appendAddress(b, srcType, src.Addr())
			return appendAddress(b, dstType, dst.Addr())
		})
		return appendNested(b, ctaTupleProto, func(b []byte) []byte {
			b = appendAttribute(b, ctaProtoNum, byte(p))
			b = appendUint16(b, ctaProtoSrcPort, src.Port())
			return appendUint16(b, ctaProtoDstPort, dst.Port())
		})
	})
}

// getRequest asks for the entry with the given tuple.
func getRequest(p service.Protocol, src, dst netip.AddrPort) netlink.Message {
	b := appendHeader(make([]byte, 0, 128), service.FamilyOf(src.Addr()))
	return netlink.Message{
		Header: netlink.Header{Type: messageGet, Flags: netlink.Request},
		Data:   appendTuple(b, ctaTupleReply, p, src, dst),
	}
}

// deleteRequest deletes the entry with f's original tuple, if it still is f:
// the kernel compares the ID.
func deleteRequest(f *Flow) netlink.Message {
	b := appendHeader(make([]byte, 0, 128), f.Family)
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.OrigSrc, f.OrigDst)
	return netlink.Message{
		Header: netlink.Header{Type: messageDelete, Flags: netlink.Request | netlink.Acknowledge},
		Data:   appendAttribute(b, ctaID, binary.BigEndian.AppendUint32(nil, f.ID)...),
	}
}

// dumpRequest asks for all entries of a family and lets the kernel leave out what
// w doesn't take: other protocols since Linux 5.8, by status since 5.15. Older ones
// ignore that.
func dumpRequest(f service.Family, w wanted) netlink.Message {
	b := appendHeader(nil, f)
	if w.protocol != 0 {
		b = appendNested(b, ctaTupleOrig, func(b []byte) []byte {
			return appendNested(b, ctaTupleProto, func(b []byte) []byte {
				return appendAttribute(b, ctaProtoNum, byte(w.protocol))
			})
		})
		b = appendNested(b, ctaFilter, func(b []byte) []byte {
			return appendAttribute(b, ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, filterProtoNum)...)
		})
	}
	if w.unanswered { // a value and which bits it is about
		b = appendAttribute(b, ctaStatus, 0, 0, 0, 0)
		b = appendAttribute(b, ctaStatusMask, 0, 0, 0, statusSeenReply)
	}
	return netlink.Message{Header: netlink.Header{Type: messageGet, Flags: netlink.Request | netlink.Dump}, Data: b}
}
