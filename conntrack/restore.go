package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

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

// Restore puts back the entry of a redirected flow that has been deleted while
// both ends still use it, f being the entry as it was. An entry that is there
// again already, or that a new connection of the client's has taken the place
// of, is left alone, and is no error.
//
// Counters begin anew. The kernel knows nothing of the connection's sequence
// numbers any more, and takes them from the next packets.
func (c *Client) Restore(f Flow) error {
	s := <-c.pool
	defer func() { c.pool <- s }()
	_, err := s.execute(restoreRequest(&f))
	if errors.Is(err, unix.EEXIST) {
		err = replace(s, &f)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("restore conntrack entry %s: %w", f, err)
	}
	return nil
}

// replace restores f where conntrack has picked up an answer meanwhile, and
// taken it for the first packet of a flow of its own.
func replace(s *socket, f *Flow) error {
	body, err := s.execute(getRequest(f.Protocol, f.ReplySrc, f.ReplyDst))
	if errors.Is(err, unix.ENOENT) {
		return unix.EEXIST // what is in the way is a flow of the client's
	}
	if err != nil {
		return err
	}
	found, err := decode(body)
	if err != nil {
		return err
	}
	if found.OrigSrc != f.ReplySrc || found.OrigDst != f.ReplyDst {
		return unix.EEXIST
	}
	if _, err := s.execute(deleteRequest(&found)); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	_, err = s.execute(restoreRequest(f))
	return err
}

// States that a restored TCP entry may have; in all others the connection isn't
// there yet, or is over.
const (
	tcpEstablished = 3
	tcpLastAck     = 6
)

// restoredTimeout is how long a restored entry lives when no packet comes, from
// which on it has the time-out of its state again. It may well end before the
// connection does: then that is seen, and it is restored once more.
const restoredTimeout = 10 * time.Minute

// tcpLiberal is IP_CT_TCP_FLAG_BE_LIBERAL: no packet is out of a window that
// the kernel doesn't know.
const tcpLiberal = 0x08

// restoreRequest makes an entry as it is before any translation, and lets the
// kernel translate it: only so does it note that there is something to
// translate (nf_nat_setup_info in nf_nat_core.c).
func restoreRequest(f *Flow) netlink.Message {
	b := appendHeader(make([]byte, 0, 320), f.Family)
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.OrigSrc, f.OrigDst)
	b = appendTuple(b, ctaTupleReply, f.Protocol, f.OrigDst, f.OrigSrc)
	b = appendTranslation(b, ctaNATDst, f.ReplySrc)
	// Also where it stays the same: the kernel would give the client another port
	// if an answer's entry is in the way.
	b = appendTranslation(b, ctaNATSrc, f.ReplyDst)
	b = appendUint32(b, ctaStatus, statusSeenReply|statusAssured|statusConfirmed)
	b = appendUint32(b, ctaTimeout, uint32(restoredTimeout/time.Second))
	if f.Mark != 0 {
		b = appendUint32(b, ctaMark, f.Mark)
	}
	if f.Protocol == service.TCP {
		b = appendTCP(b, f.TCPState)
	}
	return netlink.Message{
		Header: netlink.Header{Type: messageNew, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
		Data:   b,
	}
}

// appendTranslation appends the one address and port to translate to.
func appendTranslation(b []byte, typ uint16, to netip.AddrPort) []byte {
	lowest, highest := uint16(ctaNATv4Min), uint16(ctaNATv4Max)
	if to.Addr().Is6() {
		lowest, highest = ctaNATv6Min, ctaNATv6Max
	}
	return appendNested(b, typ, func(b []byte) []byte {
		b = appendAddress(b, lowest, to.Addr())
		b = appendAddress(b, highest, to.Addr())
		return appendNested(b, ctaNATProto, func(b []byte) []byte {
			b = appendUint16(b, ctaProtoNATPortMin, to.Port())
			return appendUint16(b, ctaProtoNATPortMax, to.Port())
		})
	})
}

func appendTCP(b []byte, state uint8) []byte {
	if state < tcpEstablished || state > tcpLastAck {
		state = tcpEstablished
	}
	return appendNested(b, ctaProtoInfo, func(b []byte) []byte {
		return appendNested(b, ctaProtoInfoTCP, func(b []byte) []byte {
			b = appendAttribute(b, ctaProtoInfoTCPState, state)
			// struct nf_ct_tcp_flags: flags, then which of them are meant.
			b = appendAttribute(b, ctaProtoInfoTCPFlagsOrig, tcpLiberal, tcpLiberal)
			return appendAttribute(b, ctaProtoInfoTCPFlagsReply, tcpLiberal, tcpLiberal)
		})
	})
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return appendAttribute(b, typ, binary.BigEndian.AppendUint32(nil, v)...)
}

const (
	// statusAssured is IPS_ASSURED: the entry isn't the first to go when the table
	// is full.
	statusAssured = 1 << 2
	// statusConfirmed is IPS_CONFIRMED, which every entry of the table has, and
	// which may not differ (ctnetlink_change_status).
	statusConfirmed = 1 << 3
)

// More numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaNATSrc = 6
	ctaNATDst = 13

	ctaNATv4Min = 1
	ctaNATv4Max = 2
	ctaNATProto = 3
	ctaNATv6Min = 4
	ctaNATv6Max = 5

	ctaProtoNATPortMin = 1
	ctaProtoNATPortMax = 2

	ctaProtoInfoTCPFlagsOrig  = 4
	ctaProtoInfoTCPFlagsReply = 5
)
