package trace

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/conntrack"
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

// A probe takes another port when somebody else gets the one that was free, and gives up
// when that goes on.
func TestProbeTakesAnotherPort(t *testing.T) {
	loopback := netip.MustParseAddr("127.0.0.1")
	listen := func() netip.AddrPort {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.Addr().(*net.TCPAddr).AddrPort()
	}
	to, taken := listen(), listen()
	tries := 0
	var p Probe
	c, from, err := p.dial(t.Context(), to, loopback, func() (uint16, error) {
		if tries++; tries == 1 {
			return taken.Port(), nil
		}
		return freePort(loopback, to.Addr())
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := c.LocalAddr().(*net.TCPAddr).AddrPort(); got != from || from == taken {
		t.Errorf("it connected from %s and says %s; %s was taken", got, from, taken)
	}

	tries = 0
	_, _, err = p.dial(t.Context(), to, loopback, func() (uint16, error) { tries++; return taken.Port(), nil })
	if !errors.Is(err, unix.EADDRINUSE) || tries != portTries {
		t.Errorf("after %d tries: %v; want %d, address already in use", tries, err, portTries)
	}
}
