package kerneltest

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Scene is a network whose node has a data plane: host 1 is the client, the others are
// endpoints on port 8080 that answer with their names, "two" to "four".
type Scene struct {
	*Network
	T      *testing.T
	Family service.Family
}

// NewScene builds a scene with hosts 1 to 4.
func NewScene(t *testing.T, f service.Family) *Scene {
	s := &Scene{Network: NewNetwork(t, 4), T: t, Family: f}
	for i, name := range []string{"two", "three", "four"} {
		s.Serve(i+2, name, 8080)
	}
	return s
}

// Addr is v4 or v6, as the scene's family is.
func (s *Scene) Addr(v4, v6 string) string {
	if s.Family == service.IPv6 {
		return v6
	}
	return v4
}

// Virtual is an address outside the network, to serve at.
func (s *Scene) Virtual(last int) string {
	return s.Addr(fmt.Sprintf("10.96.0.%d:80", last), fmt.Sprintf("[fd00:96::%d]:80", last))
}

// NodePort is a port of the node as the client reaches it.
func (s *Scene) NodePort(n uint16) string {
	return netip.AddrPortFrom(s.NodeAddress(s.Family, 1), n).String()
}

// Endpoint is that of host h.
func (s *Scene) Endpoint(h int) netip.AddrPort {
	return netip.AddrPortFrom(s.Address(s.Family, h), 8080)
}

// Endpoints adds the endpoints of the given hosts.
func (s *Scene) Endpoints(hosts ...int) func(*plan.Service) {
	var out []string
	for _, h := range hosts {
		out = append(out, s.Endpoint(h).String())
	}
	return Endpoints(out...)
}

// Asks counts who answers n connections from a host, or with which error they end. It waits longer for answers than Ask: for none,
// see Unanswered.
func (s *Scene) Asks(n, from int, proto service.Protocol, to string) map[string]int {
	s.T.Helper()
	out := map[string]int{}
	for range n {
		server, _, err := s.ask(from, proto, netip.MustParseAddrPort(to), patience*askTimeout)
		if err != nil {
			server = err.Error()
		}
		out[server]++
	}
	return out
}

// Unanswered expects that no answer comes to a connection from a host.
func (s *Scene) Unanswered(what string, from int, proto service.Protocol, to string) {
	s.T.Helper()
	if server, _, err := s.ask(from, proto, netip.MustParseAddrPort(to), silence); !errors.Is(err, ErrTimeout) {
		s.T.Errorf("%s: %q, %v, want %v", what, server, err, ErrTimeout)
	}
}

// Who returns who answers some of n connections, and the errors that others end with.
func (s *Scene) Who(n, from int, proto service.Protocol, to string) map[string]bool {
	s.T.Helper()
	out := map[string]bool{}
	for name := range s.Asks(n, from, proto, to) {
		out[name] = true
	}
	return out
}

// Seen is the client's address that the endpoint of a TCP connection sees.
func (s *Scene) Seen(from int, to string) string {
	s.T.Helper()
	_, client, err := s.ask(from, service.TCP, netip.MustParseAddrPort(to), patience*askTimeout)
	if err != nil {
		return err.Error()
	}
	return client
}

// Expect fails the test where got isn't want.
func (s *Scene) Expect(what string, want, got any) {
	s.T.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		s.T.Errorf("%s (-want +got):\n%s", what, diff)
	}
}
