package proxies

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Engine serves each port with a userspace.Server of its own, which is told that
// whatever arrives was headed for the one service it has: no rule redirects
// anything, so nobody has to ask the kernel.
func Engine(ctx context.Context, c Config, serving func()) error {
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
	if len(ports) == 0 {
		return errors.New("serve: no ports")
	}
	serving()
	return g.Wait()
}

// always is the origin of every datagram.
type always netip.AddrPort

// Lookup implements userspace.OriginLookup.
func (a always) Lookup(_ service.Protocol, _, client netip.AddrPort) (orig, realClient netip.AddrPort, err error) {
	return netip.AddrPort(a), client, nil
}

// LookupAll is what lets the Server ask for the flows of a batch at once, as it does
// with package conntrack.
func (a always) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	for i, f := range flows {
		found(i, netip.AddrPort(a), f[1], nil)
	}
}

func listen(c Config, port uint16, protocol service.Protocol) (*userspace.Server, error) {
	front := netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), port)
	cfg := userspace.Default()
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
	p := onePlan(front, protocol, netip.AddrPortFrom(c.To, port))
	s.Prepare(p)
	s.Commit(p)
	return s, nil
}

// onePlan is a plan of one service with one endpoint, to which connections are
// made from the node's own address, as other proxies make theirs.
func onePlan(front netip.AddrPort, protocol service.Protocol, endpoint netip.AddrPort) *plan.Plan {
	family := service.FamilyOf(front.Addr())
	s := &plan.Service{
		Port: &service.Port{
			Key:    service.Key{Namespace: "bench", Name: "port-" + strconv.Itoa(int(front.Port())), Protocol: protocol},
			Number: front.Port(), Retries: -1,
		},
		DataPlane: plan.Userspace,
		Frontends: []plan.Frontend{{
			Kind: plan.ClusterIP, Family: family, Protocol: protocol, Address: front,
			Verdict: plan.Forward, Masquerade: plan.MasqueradeAlways,
		}},
		Endpoints: []plan.Endpoint{{Endpoint: &service.Endpoint{Address: endpoint, Ready: true, Serving: true}, Probed: &plan.Probed{Health: "unknown"}, Usable: true}},
	}
	s.Groups[family].Cluster = []plan.Backend{{Address: endpoint, Weight: 1}}
	return &plan.Plan{Services: []*plan.Service{s}}
}
