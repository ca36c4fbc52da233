package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// header is the length of struct nfgenmsg, which precedes the attributes.
const header = 4

// decode decodes the body of a ctnetlink message: an answer, an entry of a
// dump, or an event. It accepts any bytes, and attributes that it doesn't know.
func decode(b []byte) (Flow, error) {
	var f Flow
	if len(b) < header {
		return f, fmt.Errorf("decode conntrack entry: %w", errShort)
	}
	switch b[0] {
	case unix.AF_INET:
		f.Family = service.IPv4
	case unix.AF_INET6:
		f.Family = service.IPv6
	default:
		return f, fmt.Errorf("decode conntrack entry: unknown address family %d", b[0])
	}
	if err := attributes(b[header:], f.attribute); err != nil {
		return f, fmt.Errorf("decode conntrack entry: %w", err)
	}
	return f, nil
}

func (f *Flow) attribute(typ uint16, b []byte) (err error) {
	switch typ {
	case ctaTupleOrig:
		f.OrigSrc, f.OrigDst, err = f.tuple(b)
	case ctaTupleReply:
		f.ReplySrc, f.ReplyDst, err = f.tuple(b)
	case ctaStatus:
		f.Status, err = uint32Of(b)
	case ctaMark:
		f.Mark, err = uint32Of(b)
	case ctaID:
		f.ID, err = uint32Of(b)
	case ctaTimeout:
		var seconds uint32
		seconds, err = uint32Of(b)
		f.Timeout = time.Duration(seconds) * time.Second
	case ctaZone:
		f.Zone, err = uint16Of(b)
	case ctaCountersOrig:
		f.OrigPackets, f.OrigBytes, err = countersOf(b)
	case ctaCountersReply:
		f.ReplyPackets, f.ReplyBytes, err = countersOf(b)
	case ctaProtoInfo:
		err = f.protoInfo(b)
	case ctaTimestamp:
		err = f.timestamp(b)
	}
	return err
}

// tuple returns source and destination, and notes the protocol.
func (f *Flow) tuple(b []byte) (src, dst netip.AddrPort, err error) {
	var srcAddr, dstAddr netip.Addr
	var srcPort, dstPort uint16
	err = attributes(b, func(typ uint16, b []byte) error {
		switch typ {
		case ctaTupleIP:
			return attributes(b, func(typ uint16, b []byte) (err error) {
				switch typ {
				case ctaIPv4Src, ctaIPv6Src:
					srcAddr, err = f.address(b)
				case ctaIPv4Dst, ctaIPv6Dst:
					dstAddr, err = f.address(b)
				}
				return err
			})
		case ctaTupleProto:
			return attributes(b, func(typ uint16, b []byte) (err error) {
				switch typ {
				case ctaProtoNum:
					if len(b) < 1 {
						return errShort
					}
					f.Protocol = service.Protocol(b[0])
				case ctaProtoSrcPort:
					srcPort, err = uint16Of(b)
				case ctaProtoDstPort:
					dstPort, err = uint16Of(b)
				}
				return err
			})
		}
		return nil
	})
	return netip.AddrPortFrom(srcAddr, srcPort), netip.AddrPortFrom(dstAddr, dstPort), err
}

func (f *Flow) address(b []byte) (netip.Addr, error) {
	a, ok := netip.AddrFromSlice(b)
	if !ok || a.BitLen() != f.Family.Bits() {
		return netip.Addr{}, fmt.Errorf("%d bytes are no %s address", len(b), f.Family)
	}
	return a, nil
}

func (f *Flow) protoInfo(b []byte) error {
	return attributes(b, func(typ uint16, b []byte) error {
		if typ != ctaProtoInfoTCP {
			return nil
		}
		return attributes(b, func(typ uint16, b []byte) error {
			if typ != ctaProtoInfoTCPState {
				return nil
			}
			if len(b) < 1 {
				return errShort
			}
			f.TCPState = b[0]
			return nil
		})
	})
}

func (f *Flow) timestamp(b []byte) error {
	return attributes(b, func(typ uint16, b []byte) error {
		if typ != ctaTimestampStart {
			return nil
		}
		nanoseconds, err := uint64Of(b)
		f.Start = time.Unix(0, int64(nanoseconds))
		return err
	})
}

func countersOf(b []byte) (packets, bytes uint64, err error) {
	err = attributes(b, func(typ uint16, b []byte) (err error) {
		switch typ {
		case ctaCountersPackets:
			packets, err = uint64Of(b)
		case ctaCountersBytes:
			bytes, err = uint64Of(b)
		}
		return err
	})
	return packets, bytes, err
}

// ctnetlink's integers are in network order, unlike the rest of netlink.

func uint16Of(b []byte) (uint16, error) {
	if len(b) < 2 {
		return 0, errShort
	}
	return binary.BigEndian.Uint16(b), nil
}

func uint32Of(b []byte) (uint32, error) {
	if len(b) < 4 {
		return 0, errShort
	}
	return binary.BigEndian.Uint32(b), nil
}

func uint64Of(b []byte) (uint64, error) {
	if len(b) < 8 {
		return 0, errShort
	}
	return binary.BigEndian.Uint64(b), nil
}
