package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestConntrackSettings: what is configured of connection tracking is set, and
// what this network namespace can't set is told, and is no reason not to serve.
// Where conntrack is to be liberal, nothing is dropped for being invalid.
func TestConntrackSettings(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--conntrack-max-per-core", "7777777", "--conntrack-tcp-timeout-established", "3h", "--conntrack-tcp-timeout-close-wait", "2m",
		"--conntrack-udp-timeout", "17s", "--conntrack-udp-timeout-stream", "71s", "--conntrack-tcp-be-liberal")
	for name, want := range map[string]string{
		"tcp_timeout_established": "10800", "tcp_timeout_close_wait": "120", "udp_timeout": "17", "udp_timeout_stream": "71", "tcp_be_liberal": "1",
	} {
		if got := strings.TrimSpace(w.node("cat", "/proc/sys/net/netfilter/nf_conntrack_"+name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	st, err := w.client.Status(w.ctx)
	w.must(err)
	told := false
	for _, c := range st.Capabilities {
		told = told || strings.HasSuffix(c.Name, "nf_conntrack_max") && !c.Supported && strings.Contains(c.Reason, "it can't be set here")
	}
	if !told {
		t.Errorf("the status doesn't say that nf_conntrack_max can't be set here: %+v", st.Capabilities)
	}
	if rules := w.node("iptables-save", "-t", "filter"); strings.Contains(rules, "-j KPROXY-INVALID") {
		t.Errorf("packets are dropped although conntrack is liberal:\n%s", rules)
	}
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
	}
}

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
	ctx, cancel := context.WithTimeout(w.ctx, patience(10*time.Second))
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
		w.must(c.SetDeadline(time.Now().Add(patience(10 * time.Second))))
		_, err := io.WriteString(c, "hello\n")
		if err == nil {
			_, err = bufio.NewReader(c).ReadString('\n')
		}
		if err != nil {
			w.Fatalf("the connection from %s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}

// TestInvalidPackets: packets of an endpoint that conntrack can't place, because
// they are outside of the TCP window, reach no client, which would answer with a
// reset that ends the connection: neither one elsewhere, nor one that is
// masqueraded, nor the node itself, whatever carries the connection. That holds
// for an endpoint that gets no new connections too. (kubernetes/kubernetes#74839,
// #117924)
func TestInvalidPackets(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends[0], w.net.Backends[1])
	m.Type, m.Ports[0].NodePort = "NodePort", 30080
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	var intruders []*intruder
	for _, b := range w.net.Backends[:2] {
		intruders = append(intruders, w.intrude(b))
	}
	var held []*lab.Held
	hold := func(from *lab.Namespace, target netip.AddrPort) {
		t.Helper()
		h, err := lab.Hold(w.ctx, lab.HoldConfig{From: from, Network: "tcp", Target: target, Every: within(50 * time.Millisecond), Timeout: patience(10 * time.Second)})
		w.must(err)
		t.Cleanup(func() { h.Close() })
		held = append(held, h)
	}
	unharmed := func(when string) {
		t.Helper()
		var before []int
		for _, h := range held {
			before = append(before, h.Exchanges())
		}
		sleep(time.Second)
		w.eventually(20*time.Second, when+": each connection goes on", func() error {
			for i, h := range held {
				if h.Exchanges() == before[i] && h.Err() == nil {
					return fmt.Errorf("connection %d of %d stands still", i+1, len(held))
				}
			}
			return nil
		})
		w.unbroken(when, held...)
		for i, in := range intruders {
			if in.sent.Load() == 0 || in.resets.Load() > 0 {
				t.Errorf("%s: %d packets of endpoint %d were answered with %d resets, want none", when, in.sent.Load(), i+1, in.resets.Load())
			}
		}
	}
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for f, target := range frontends(m) {
			nodePort := netip.AddrPortFrom(w.net.Config.NodeAddresses()[f], 30080)
			for range 2 { // one for each endpoint
				hold(w.net.Client, target)
				hold(w.net.Client, nodePort)
				hold(w.net.Node, target)
			}
		}
		unharmed(string(plane))
	}
	w.metric("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", func(v float64) bool { return v > 0 })
	m = m.Edit("b2", func(e *lab.ManifestEndpoint) { e.NotReady, e.Terminating = true, true })
	w.must(m.Write(w.manifests))
	w.eventually(10*time.Second, "b2 to get no new connection", func() error {
		for _, e := range w.service("web", "line").Endpoints {
			if e.Terminating && !e.Usable {
				return nil
			}
		}
		return fmt.Errorf("it does: %+v", w.service("web", "line").Endpoints)
	})
	unharmed("an endpoint on its way out")
}
