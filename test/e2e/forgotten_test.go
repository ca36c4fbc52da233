package e2e

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"regexp"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// busy opens a connection that is used all the time.
func (w *world) busy(target netip.AddrPort) *lab.Held {
	w.Helper()
	h, err := lab.Hold(w.ctx, lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: target, Every: time.Microsecond, Timeout: within(5 * time.Second)})
	w.must(err)
	w.Cleanup(func() { h.Close() })
	return h
}

// TestForgottenConnectionsGoOn: connections that userspace carries of a service
// that the kernel has by now survive that conntrack forgets them, also while
// they are used.
func TestForgottenConnectionsGoOn(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferUserspace)
	var idle, busy []*lab.Held
	for _, target := range frontends(m) {
		for range 5 {
			idle = append(idle, w.hold(target))
			busy = append(busy, w.busy(target))
		}
	}
	w.pin("web", "line", service.PreferKernel)
	for range 10 {
		w.node("conntrack", "-F")
		sleep(300 * time.Millisecond)
	}
	w.unbroken("used now and then", idle...)
	w.unbroken("used all the time", busy...)
	w.carriedBy(idle, plan.Userspace)
}

// TestIPVSForgetsOnlyItsOwn: when IPVS forgets a connection, it has conntrack
// forget whatever has the same addresses and ports. Here that is a later
// connection of the client's, from the same port, which userspace carries.
func TestIPVSForgetsOnlyItsOwn(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	for _, target := range frontends(m) {
		c := w.fromPort(target, 5000)
		w.goesOn(c)
		w.must(c.(*net.TCPConn).SetLinger(0)) // IPVS remembers a reset for 10 s
		w.must(c.Close())
	}
	w.pin("web", "line", service.PreferUserspace)
	var held []net.Conn
	for _, target := range frontends(m) {
		held = append(held, w.fromPort(target, 5000))
		w.goesOn(held...)
	}
	w.pin("web", "line", service.PreferKernel)
	remembers := regexp.MustCompile(`:5000 `).MatchString
	if found := w.node("ipvsadm", "-Lnc"); !remembers(found) {
		t.Fatalf("IPVS has forgotten already:\n%s", found)
	}
	w.eventually(30*time.Second, "IPVS to forget", func() error {
		w.goesOn(held...)
		if found := w.node("ipvsadm", "-Lnc"); remembers(found) {
			return errors.New(found)
		}
		return nil
	})
	sleep(time.Second)
	w.goesOn(held...)
}

// fromPort opens a connection from a port of the client's.
func (w *world) fromPort(target netip.AddrPort, port uint16) net.Conn {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, within(5*time.Second))
	defer cancel()
	local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(w.net.Config.ClientAddresses(0)[service.FamilyOf(target.Addr())], port))
	c, err := w.net.Client.DialFrom(ctx, local, "tcp", target.String())
	w.must(err)
	w.Cleanup(func() { c.Close() })
	return c
}

// goesOn makes an exchange on each connection.
func (w *world) goesOn(connections ...net.Conn) {
	w.Helper()
	for _, c := range connections {
		w.must(c.SetDeadline(time.Now().Add(within(5 * time.Second))))
		_, err := io.WriteString(c, "hello\n")
		if err == nil {
			_, err = bufio.NewReader(c).ReadString('\n')
		}
		if err != nil {
			w.Fatalf("the connection from %s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}
