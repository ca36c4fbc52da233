package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/userspace"
)

// ownConfig says what one of the benchmark's own proxies serves: ports of one address,
// each connected to the same port of another.
type ownConfig struct {
	Listen netip.Addr `json:"listen"`
	To     netip.Addr `json:"to"`
	TCP    []uint16   `json:"tcp,omitempty"`
	UDP    []uint16   `json:"udp,omitempty"`
}

// runCopy is a proxy of two goroutines for each connection with io.Copy, which
// splices where the kernel can: the simplest proxy that Go has. It serves TCP.
func runCopy(ctx context.Context, c ownConfig, serving func()) error {
	for _, port := range c.TCP {
		l, err := net.Listen("tcp4", netip.AddrPortFrom(c.Listen, port).String())
		if err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		defer l.Close()
		go func() {
			for {
				client, err := l.Accept()
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					go relay(client, netip.AddrPortFrom(c.To, port).String())
				}
			}
		}()
	}
	serving()
	<-ctx.Done()
	return nil
}

func relay(client net.Conn, to string) {
	defer client.Close()
	server, err := net.Dial("tcp4", to)
	if err != nil {
		return
	}
	defer server.Close()
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // whatever ended it: the other side sees the end
		_ = to.(*net.TCPConn).CloseWrite()
	}
	var wg sync.WaitGroup
	wg.Go(func() { pass(server, client) })
	pass(client, server)
	wg.Wait()
}

// runEngine is kproxy's userspace data plane without anything around it, so that engine
// can be compared with engine. Each port has a userspace.Server of its own, for which
// every connection was headed for the one service it has: no rule redirects
// anything, so it needn't ask the kernel.
func runEngine(ctx context.Context, c ownConfig, serving func()) error {
	g, ctx := errgroup.WithContext(ctx)
	ports := map[uint16]service.Protocol{}
	for _, p := range c.TCP {
		ports[p] = service.TCP
	}
	for _, p := range c.UDP {
		ports[p] = service.UDP
	}
	for port, protocol := range ports {
		s, err := listen(c, port, protocol)
		if err != nil {
			return err
		}
		g.Go(func() error { return s.Run(ctx) })
		defer s.Drain(ctx)
	}
	serving()
	return g.Wait()
}

// always is the origin of every datagram.
type always netip.AddrPort

// LookupAll implements userspace.OriginLookup.
func (a always) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	for i, f := range flows {
		found(i, netip.AddrPort(a), f[1], nil)
	}
}

func listen(c ownConfig, port uint16, protocol service.Protocol) (*userspace.Server, error) {
	front := netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), port)
	var cfg userspace.Config
	cfg.TCPOrigin = func(int, service.Family) (netip.AddrPort, error) { return front, nil }
	if protocol == service.UDP {
		cfg.UDPPort, cfg.Origin = port, always(front)
	} else {
		cfg.TCPPort = port
	}
	s := userspace.New(cfg)
	if err := s.Listen(); err != nil {
		return nil, fmt.Errorf("serve port %d: %w", port, err)
	}
	// Connections are made from the node's own address, as other proxies make theirs.
	p := kerneltest.Plan(plan.ModeUserspace, kerneltest.Service(fmt.Sprint("port-", port), protocol, kerneltest.InUserspace,
		kerneltest.External(front.String()), kerneltest.Endpoints(netip.AddrPortFrom(c.To, port).String()), func(s *plan.Service) {
			s.Port.Retries = -1
			if port == load.Session.Port() {
				s.Port.Responses = 1 // as nginx is told
			}
		}))
	s.Prepare(p, plan.Between(nil, p))
	s.Commit()
	return s, nil
}
