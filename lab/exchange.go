package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"
)

// Answer holds what a backend said about one exchange.
type Answer struct {
	Backend string     // its name
	Peer    netip.Addr // the client's address as the backend saw it
	Payload string
}

// ParseAnswer splits an answer of the line protocol.
func ParseAnswer(s string) (Answer, error) {
	parts := strings.SplitN(strings.TrimSuffix(s, "\n"), " ", 3)
	if len(parts) < 3 {
		return Answer{}, fmt.Errorf("parse answer %q: no backend, peer and payload", s)
	}
	peer, err := netip.ParseAddr(parts[1])
	if err != nil {
		return Answer{}, fmt.Errorf("parse answer %q: %w", s, err)
	}
	return Answer{Backend: parts[0], Peer: peer, Payload: parts[2]}, nil
}

// Ask opens a connection from the namespace (network "tcp" or "udp"),
// exchanges one line or datagram with a backend, and closes it.
func (n *Namespace) Ask(ctx context.Context, network string, target netip.AddrPort, payload string) (Answer, error) {
	return n.AskFrom(ctx, netip.Addr{}, network, target, payload)
}

// AskFrom is Ask from a given local address; the zero Addr lets the kernel choose.
func (n *Namespace) AskFrom(ctx context.Context, local netip.Addr, network string, target netip.AddrPort, payload string) (Answer, error) {
	return n.askFrom(ctx, netip.AddrPortFrom(local, 0), network, target, payload, false)
}

// askFrom ends a TCP connection in order, or by a reset.
func (n *Namespace) askFrom(ctx context.Context, local netip.AddrPort, network string, target netip.AddrPort, payload string, reset bool) (Answer, error) {
	c, err := n.DialFrom(ctx, localAddr(local, network), network, target.String())
	if err != nil {
		return Answer{}, err
	}
	defer c.Close()
	if tcp, ok := c.(*net.TCPConn); ok && reset {
		_ = tcp.SetLinger(0) // fails only on a closed connection
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	return exchange(c, network, payload)
}

// exchange sends one payload on an open connection and reads its answer.
func exchange(c net.Conn, network, payload string) (Answer, error) {
	line := payload
	if network != "udp" {
		line += "\n"
	}
	if _, err := c.Write([]byte(line)); err != nil {
		return Answer{}, err
	}
	s, err := readAnswer(c, network)
	if err != nil {
		return Answer{}, err
	}
	a, err := ParseAnswer(s)
	if err != nil {
		return Answer{}, err
	}
	if a.Payload != payload && len(s) < MaxDatagram {
		return a, fmt.Errorf("answer has payload %q, want %q", abbreviate(a.Payload), abbreviate(payload))
	}
	return a, nil
}

// readAnswer reads one line or datagram. It reads no further than the line:
// the other end speaks only when it is asked.
func readAnswer(c net.Conn, network string) (string, error) {
	if network == "udp" {
		buf := make([]byte, 1<<16)
		n, err := c.Read(buf)
		return string(buf[:n]), err
	}
	var line []byte
	buf := make([]byte, 1<<10)
	for {
		n, err := c.Read(buf)
		line = append(line, buf[:n]...)
		if n > 0 && line[len(line)-1] == '\n' {
			return string(line), nil
		}
		if err != nil {
			return string(line), err
		}
	}
}

func abbreviate(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}

func localAddr(a netip.AddrPort, network string) net.Addr {
	switch {
	case a == netip.AddrPort{}:
		return nil
	case network == "udp":
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}
