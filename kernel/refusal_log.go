package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// Rules that refuse or drop what begins a connection to a service log it before
// (nfnetlink_log), as far as the rate lets them: with the reason as its prefix, to a group
// that only kproxy reads. Without a reader the kernel drops it.
const (
	RefusalGroup = 10249
	RefusalRate  = 20 // a second, of each rule
	RefusalBurst = 50
)

// Likewise rules tell of connections to endpoints that may have no answer: of SYNs that come a second time, at once, and of
// some of the UDP flows that begin. There the packet's destination is the endpoint already.
const (
	ReasonUnansweredSYN = "unanswered SYN"
	UnansweredRate      = 100
	UnansweredBurst     = 200

	ReasonUDPSample = "UDP flow begins"
	SampleRate      = 10
	SampleBurst     = 10
)

// Why connections are refused or dropped.
const (
	ReasonNoEndpoint = "no usable endpoint"
	ReasonElsewhere  = "the traffic policy allows no endpoint here"
	ReasonOutside    = "not in the source ranges"
	ReasonNoKproxy   = "no live kproxy"
	ReasonNoPort     = "no service has this port at this address"
	ReasonNoService  = "no service has this address of the ServiceCIDRs"
)

// LogRefusal is the rule of iptables that logs, as iptables-save prints it.
func LogRefusal(reason string) string { return logRule(RefusalRate, RefusalBurst, reason) }

// LogUnanswered is the rule that tells of a SYN that came a second time, LogSample that of a UDP flow's beginning.
func LogUnanswered() string {
	return logRule(UnansweredRate, UnansweredBurst, ReasonUnansweredSYN) + " --nflog-threshold 1"
}

func LogSample() string { return logRule(SampleRate, SampleBurst, ReasonUDPSample) }

func logRule(rate, burst int, reason string) string {
	return fmt.Sprintf("-m limit --limit %d/sec --limit-burst %d -j NFLOG --nflog-prefix %q --nflog-group %d", rate, burst, reason, RefusalGroup)
}

// Refusal is a packet that a rule refused or dropped, or that may have no answer.
type Refusal struct {
	Protocol        service.Protocol
	Client, Address netip.AddrPort
	Reason          string
}

// RefusalLog reads what those rules log. It is bound to the network namespace of the thread that
// called [OpenRefusalLog].
type RefusalLog struct{ file *os.File }

// What x/sys/unix doesn't have of linux/netfilter/nfnetlink_log.h.
const (
	logPacket = unix.NFNL_SUBSYS_ULOG << 8   // NFULNL_MSG_PACKET, 0
	logConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1 // NFULNL_MSG_CONFIG

	logCommand  = 1 // NFULA_CFG_CMD
	logMode     = 2 // NFULA_CFG_MODE
	bindCommand = 1 // NFULNL_CFG_CMD_BIND
	copyPacket  = 2 // NFULNL_COPY_PACKET

	logPayload = 9  // NFULA_PAYLOAD
	logPrefix  = 10 // NFULA_PREFIX
)

// logRoom holds what the kernel collects for one message (NFULNL_NLBUFSIZ_DEFAULT is a page).
const logRoom = 64 << 10

// headers are as many bytes of a packet as have its addresses and ports, IPv4's options included.
const headers = 64

// OpenRefusalLog begins to read. One socket may read a group: while another does, the error is
// [unix.EPERM] or [unix.EBUSY].
func OpenRefusalLog() (*RefusalLog, error) {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER, 4<<10)
	if err != nil {
		return nil, fmt.Errorf("open log of refusals: %w", err)
	}
	settings := [][]byte{
		netlink.Append(nil, logCommand, bindCommand),
		netlink.Append(nil, logMode, append(binary.BigEndian.AppendUint32(nil, headers), copyPacket, 0)...), // struct nfulnl_msg_config_mode
	}
	var refused error
	err = socket.Do(len(settings), func(b []byte, i int) []byte {
		b = netlink.AppendRequest(b, logConfig, unix.NLM_F_ACK)
		b = append(b, unix.AF_UNSPEC, unix.NFNETLINK_V0, RefusalGroup>>8, RefusalGroup&0xff)
		return append(b, settings[i]...)
	}, func(_ int, _ []byte, err error) { refused = errors.Join(refused, err) })
	l := &RefusalLog{os.NewFile(uintptr(socket.FD), "log of refusals")}
	if err = errors.Join(err, refused); err != nil {
		return nil, errors.Join(fmt.Errorf("read netfilter's log group %d: %w", RefusalGroup, err), l.Close())
	}
	return l, nil
}

// Close closes the socket.
func (l *RefusalLog) Close() error { return l.file.Close() }

// Run calls f with each of them, a second after it at most, from one goroutine, until ctx ends. What comes faster than it is
// read is lost.
func (l *RefusalLog) Run(ctx context.Context, f func(Refusal)) error {
	stop := context.AfterFunc(ctx, func() { _ = l.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, logRoom)
	for {
		n, err := l.file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			continue
		case err != nil:
			return fmt.Errorf("read log of refusals: %w", err)
		}
		for m := range netlink.Messages(buf[:n]) {
			if r, ok := refusalOf(&m); ok {
				f(r)
			}
		}
	}
}

// refusalOf reads a message; false for others, and where the packet's headers aren't whole or are
// of a protocol without ports.
func refusalOf(m *netlink.Message) (out Refusal, ok bool) {
	if m.Type != logPacket || len(m.Body) < netlink.SizeofNetfilter {
		return out, false
	}
	var packet []byte
	for typ, v := range netlink.Attributes(m.Body[netlink.SizeofNetfilter:]) {
		switch typ {
		case logPayload:
			packet = v
		case logPrefix:
			out.Reason = netlink.Text(v)
		}
	}
	at, size, from, protocol := 0, 4, 12, 9 // of IPv4 (RFC 791): where the next header begins, an address's bytes, where the first is, the protocol
	switch {
	case len(packet) > 0 && packet[0]>>4 == 4:
		at = 4 * int(packet[0]&0xf)
	case len(packet) > 0 && packet[0]>>4 == 6: // RFC 8200, without extension headers
		at, size, from, protocol = 40, 16, 8, 6
	default:
		return out, false
	}
	if len(packet) < max(at, from+2*size)+4 {
		return out, false
	}
	out.Protocol = service.Protocol(packet[protocol])
	end := func(address, port int) netip.AddrPort {
		a, _ := netip.AddrFromSlice(packet[address : address+size])
		return netip.AddrPortFrom(a, binary.BigEndian.Uint16(packet[port:]))
	}
	out.Client, out.Address = end(from, at), end(from+size, at+2)
	switch out.Protocol {
	case service.TCP, service.UDP, service.SCTP:
		return out, true
	}
	return out, false
}
