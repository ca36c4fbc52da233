package trace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// listener is a socket that waits for connections or datagrams.
type listener struct {
	address netip.AddrPort
	v6only  bool
}

// sockets that wait: a UDP socket that isn't connected is in TCP_CLOSE
// (include/net/tcp_states.h).
const (
	tcpListen = 10
	tcpClose  = 7
)

// inetDiagSKV6Only is INET_DIAG_SKV6ONLY (include/uapi/linux/inet_diag.h).
const inetDiagSKV6Only = 11

// diagRequest is struct inet_diag_req_v2.
type diagRequest struct {
	family, protocol uint8
	states           uint32
	port             uint16
}

func (r *diagRequest) Len() int { return 56 }

func (r *diagRequest) Serialize() []byte {
	b := make([]byte, r.Len())
	b[0], b[1] = r.family, r.protocol
	binary.NativeEndian.PutUint32(b[4:], r.states)
	binary.BigEndian.PutUint16(b[8:], r.port) // id.idiag_sport limits a dump
	return b
}

// listenersOn returns the sockets that wait on a port (sock_diag(7)), asking only
// for those: a host has many sockets.
func listenersOn(proto service.Protocol, port uint16) ([]listener, error) {
	state := uint32(1 << tcpListen)
	if proto == service.UDP {
		state = 1 << tcpClose
	}
	var out []listener
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		req.AddData(&diagRequest{family: family, protocol: uint8(proto), states: state, port: port})
		msgs, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
		if err != nil {
			return nil, fmt.Errorf("list sockets that listen: %w", err)
		}
		for _, m := range msgs {
			if l, ok := parseListener(m); ok && l.address.Port() == port {
				out = append(out, l)
			}
		}
	}
	return out, nil
}

// parseListener reads a struct inet_diag_msg with its attributes.
func parseListener(m []byte) (listener, bool) {
	const size = 72
	if len(m) < size {
		return listener{}, false
	}
	raw := m[8:12]
	if m[0] == unix.AF_INET6 {
		raw = m[8:24]
	}
	a, _ := netip.AddrFromSlice(raw)
	l := listener{address: netip.AddrPortFrom(a, binary.BigEndian.Uint16(m[4:]))}
	for kind, value := range nlmsg.Attributes(m[size:]) {
		l.v6only = l.v6only || kind == inetDiagSKV6Only && len(value) > 0 && value[0] != 0
	}
	return l, true
}

// takes reports whether l would get what is sent to an address.
func (l *listener) takes(a netip.Addr) bool {
	at := l.address.Addr()
	if !at.IsUnspecified() {
		return at.Unmap() == a
	}
	return at.Is4() == a.Is4() || at.Is6() && !l.v6only
}

// listenerFor returns the socket that gets what is sent to a local address.
func listenerFor(proto service.Protocol, to netip.AddrPort) (listener, bool, error) {
	all, err := listenersOn(proto, to.Port())
	for _, l := range all {
		if l.takes(to.Addr()) {
			return l, true, nil
		}
	}
	return listener{}, false, err
}
