package passive

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/service"
)

// Network is the [Prober] of this host's network. It is safe for concurrent use.
type Network struct{ probe.Network }

// Endpoint implements [Prober]. Of a UDP endpoint an ICMP error is a refusal, and all else is as good as an answer. A TCP connection ends by
// FIN: the endpoint is most often well, and would count a reset among its errors.
func (n Network) Endpoint(ctx context.Context, e health.Endpoint) Answer {
	kind := service.CheckTCP
	if e.Protocol == service.UDP {
		kind = service.CheckUDP
	}
	n.FIN = true
	err := n.Probe(ctx, health.Target{Protocol: e.Protocol, Address: e.Address, Check: service.HealthCheck{Kind: kind}})
	switch {
	case err == nil, errors.Is(err, health.ErrSilent):
		return Accepts
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refuses
	case probe.Inconclusive(err), errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES): // a rule of this host's, for one
		return Unknown
	}
	return Nothing
}

// Host implements [Prober].
func (n Network) Host(ctx context.Context, e health.Endpoint) Answer {
	answers := make(chan Answer, 2)
	go func() { answers <- n.Endpoint(ctx, health.Endpoint{Protocol: service.TCP, Address: e.Address}) }()
	go func() { answers <- n.echo(ctx, e.Address.Addr()) }()
	a := <-answers
	if a == Nothing || a == Unknown {
		if b := <-answers; b != Unknown { // where only one could be sent, it stands for both
			a = b
		}
	}
	return a
}

// echo sends an ICMP echo request (RFC 792, RFC 4443) and waits for its reply.
func (n Network) echo(ctx context.Context, to netip.Addr) Answer {
	network, protocol, request, reply := "ip4:icmp", 1, icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply)
	if to.Is6() {
		network, protocol, request, reply = "ip6:ipv6-icmp", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	c, err := (&net.Dialer{Control: n.SetMark}).DialContext(ctx, network, to.String()) // the kernel passes it what comes from there alone
	if err != nil {
		return Unknown
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	id := rand.IntN(1 << 16)
	b, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Data: []byte("kproxy")}}).Marshal(nil)
	if err != nil {
		return Unknown
	}
	if _, err := c.Write(b); errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		return Nothing
	} else if err != nil {
		return Unknown
	}
	buf := make([]byte, 1500)
	for {
		size, err := c.Read(buf)
		if err != nil {
			return Nothing
		}
		m, err := icmp.ParseMessage(protocol, buf[:size])
		if err != nil || m.Type != reply {
			continue
		}
		if body, ok := m.Body.(*icmp.Echo); ok && body.ID == id {
			return Accepts
		}
	}
}
