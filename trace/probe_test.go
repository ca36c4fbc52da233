package trace

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/service"
)

// Of all entries of conntrack, those of other clients with the probe's port, and of its
// client with another one, aren't its own.
func TestFlowsBetween(t *testing.T) {
	flow := func(src, dst string) conntrack.Flow {
		return conntrack.Flow{OrigSrc: netip.MustParseAddrPort(src), OrigDst: netip.MustParseAddrPort(dst)}
	}
	own := flow("10.1.0.2:5000", "10.96.0.10:80")
	all := []conntrack.Flow{flow("10.1.0.3:5000", "10.96.0.10:80"), own, flow("10.1.0.2:5001", "10.96.0.10:80"), flow("10.1.0.2:5000", "10.96.0.10:81")}
	if got := flowsBetween(all, own.OrigSrc, own.OrigDst); len(got) != 1 || got[0] != own {
		t.Errorf("got %v, want %v", got, own)
	}
}

// The address that a probe has is known whether it connects or not.
func TestProbeKnowsItsAddress(t *testing.T) {
	for _, at := range []string{"127.0.0.1", "::1"} {
		l, err := net.Listen("tcp", net.JoinHostPort(at, "0"))
		if err != nil {
			t.Fatal(err)
		}
		to := netip.MustParseAddrPort(l.Addr().String())
		for _, from := range []netip.Addr{{}, netip.MustParseAddr(at)} {
			x := newTracer(Request{Address: to, Protocol: service.TCP, From: from}, nil, nil)
			x.client.Address = netip.MustParseAddr(at)
			c, local, err := x.dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got := c.LocalAddr().String(); got != local.String() {
				t.Errorf("it connected from %s and says %s", got, local)
			}
			c.Close()
		}
		l.Close()
		x := newTracer(Request{Address: to, Protocol: service.TCP}, nil, nil)
		x.client.Address = netip.MustParseAddr(at)
		if c, local, err := x.dial(t.Context()); c != nil || !errors.Is(err, unix.ECONNREFUSED) || local.Addr() != x.client.Address || local.Port() == 0 {
			t.Errorf("refused: %v from %s", err, local)
		}
	}
}
