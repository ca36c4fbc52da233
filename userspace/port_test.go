package userspace

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSourcePortsAreTriedUntilOneIsFree(t *testing.T) {
	p := ports{20000, 20003}
	client := netip.MustParseAddr("10.1.0.2")
	for _, taken := range []error{unix.EADDRINUSE, &net.OpError{Op: "dial", Err: unix.EADDRNOTAVAIL}} {
		var tried []netip.AddrPort
		err := p.from(client, func(a netip.AddrPort) error {
			tried = append(tried, a)
			if len(tried) < 3 {
				return taken
			}
			return nil
		})
		if err != nil || len(tried) != 3 {
			t.Errorf("%v: %v after %d tries, want success after 3", taken, err, len(tried))
		}
		for _, a := range tried {
			if a.Addr() != client || a.Port() < p.low || a.Port() > p.high {
				t.Errorf("tried %s, want a port from %d to %d of %s", a, p.low, p.high, client)
			}
		}
	}
}

func TestTheKernelChoosesWhereNoSourcePortIsFree(t *testing.T) {
	var last netip.AddrPort
	err := ports{20000, 20003}.from(netip.MustParseAddr("10.1.0.2"), func(a netip.AddrPort) error {
		if last = a; a.Port() != 0 {
			return unix.EADDRINUSE
		}
		return nil
	})
	if err != nil || last.Port() != 0 {
		t.Errorf("last tried %s, %v; want port 0 and success", last, err)
	}
}

func TestOtherFailuresOfAConnectAreFinal(t *testing.T) {
	tries := 0
	err := ports{20000, 20003}.from(netip.MustParseAddr("10.1.0.2"), func(netip.AddrPort) error { tries++; return unix.ECONNREFUSED })
	if !errors.Is(err, unix.ECONNREFUSED) || tries != 1 {
		t.Errorf("%v after %d tries, want the refusal after one", err, tries)
	}
}

func TestSourcePortsAreNotThoseOfClients(t *testing.T) {
	if p := belowClients(); p.high > 0 && (p.low < lowestPort || p.high-p.low < fewestPorts-1) {
		t.Errorf("ports from %d to %d, want some thousands", p.low, p.high)
	}
}
