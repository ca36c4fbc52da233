package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// TestLoopsEnd: a service whose endpoints are two nodes at its own node port, so that each node forwards to the other: a client's
// connection or datagram ends as it would where the kernel forwards all of it, and a node's status names the loop.
func TestLoopsEnd(t *testing.T) {
	t.Parallel()
	for name, pin := range map[string]service.Preference{"pinned": service.PreferUserspace, "not pinned": ""} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			second := w.net.Backends[0]
			if out, err := second.Namespace.Output(w.ctx, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"); err != nil {
				t.Fatalf("forward IPv6 on the second node: %v\n%s", err, out)
			}
			m := newManifest("loop", 10, second)
			m.Type, m.DataPlane, m.Ports = "NodePort", string(pin), m.Ports[:2]
			for i := range m.Ports {
				m.Ports[i].Target, m.Ports[i].NodePort = 30080, 30080
			}
			m.Endpoints[0].Node = "second"
			m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{Name: "node", Addresses: w.net.Config.NodeAddresses(), Weight: 1})
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off", "--passive-health=false")
			other := w.secondNode(second.Namespace)
			round := func(when string) {
				for _, a := range w.net.Config.NodeAddresses() {
					for _, network := range []string{"tcp", "udp"} {
						w.loops(when, network, netip.AddrPortFrom(a, 30080), other)
					}
				}
			}
			round("at first")
			if pin != "" {
				w.namesTheLoop(other)
				w.collapses(netip.AddrPortFrom(w.net.Config.NodeAddresses()[0], 30080), w.client, other)
				return
			}
			w.await("loop", "line", w.plane, plan.StateOffloaded)
			w.await("loop", "datagram", w.plane, plan.StateOffloaded)
			round("offloaded")
		})
	}
}

// secondNode runs kproxy beside the node's, in another namespace.
func (w *world) secondNode(at *lab.Namespace) *web.Client {
	w.Helper()
	socket := filepath.Join(w.dir, "second.sock")
	args := slices.Clone(w.proxy.Args)
	for flag, value := range map[string]string{"--socket": socket, "--state-dir": filepath.Join(w.dir, "second"), "--hostname-override": "second"} {
		args[slices.Index(args, flag)+1] = value
	}
	p := &lab.Process{Namespace: at, Path: binary, Env: w.env, Args: args}
	w.must(p.Start())
	w.Cleanup(func() {
		w.must(p.Kill())
		if w.Failed() {
			w.Logf("the second kproxy's log:\n%s", p.Log())
		}
	})
	c := web.NewClient(socket)
	w.eventually(20*time.Second, "the second kproxy to be ready", func() error {
		st, err := c.Status(w.ctx)
		if err == nil && !st.Ready {
			err = errors.New(st.NotReady)
		}
		return err
	})
	return c
}

// loops sends a client's first packet into the loop: nothing of it is left soon, and it made no more connections than it has hops,
// but for those that were tried beside. A client of TCP hears of it.
func (w *world) loops(when, network string, to netip.AddrPort, other *web.Client) {
	w.Helper()
	before := w.carried(w.client) + w.carried(other)
	ctx, cancel := context.WithTimeout(w.ctx, within(20*time.Second))
	defer cancel()
	c, err := w.net.Client.Dial(ctx, network, to.String())
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(within(20 * time.Second)))
		if network == "udp" {
			fmt.Fprintln(c, "hello")
		} else if _, err = c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
			w.Errorf("%s: %s to %s: %v, want the connection to end", when, network, to, err)
		}
	}
	w.eventually(20*time.Second, fmt.Sprintf("%s: %s to %s to have gone", when, network, to), func() error {
		was := w.packetsBetween()
		time.Sleep(300 * time.Millisecond)
		if n := w.packetsBetween() - was; n > 30 {
			return fmt.Errorf("%d packets between the nodes in 0.3 s", n)
		}
		return nil
	})
	if n := w.carried(w.client) + w.carried(other) - before; n > 200 {
		w.Errorf("%s: %s to %s made %d connections", when, network, to, n)
	}
}

// packetsBetween counts those that the node has had from the second one.
func (w *world) packetsBetween() int {
	w.Helper()
	_, counts, _ := strings.Cut(w.node("cat", "/proc/net/dev"), w.net.Backends[0].Name+":")
	n, err := strconv.Atoi(strings.Fields(counts)[1])
	w.must(err)
	return n
}

// carried counts the connections and sessions that a kproxy's userspace and kernel have had.
func (w *world) carried(c *web.Client) (n uint64) {
	w.Helper()
	st, err := c.Status(w.ctx)
	w.must(err)
	for _, s := range st.Services {
		n += s.Connections.Attempts()
	}
	return n
}

// collapses: when a client has gone whose first packet is in the loop, no connection of the chain is left.
func (w *world) collapses(to netip.AddrPort, at ...*web.Client) {
	w.Helper()
	c, err := w.net.Client.Dial(w.ctx, "tcp", to.String())
	if err == nil {
		err = c.Close()
	}
	if !errors.Is(err, unix.ECONNRESET) { // the loop has ended so soon that connect saw it
		w.must(err)
	}
	w.eventually(5*time.Second, "the chain of connections to end", func() error {
		for _, c := range at {
			st, err := c.Status(w.ctx)
			if err != nil {
				return err
			}
			for _, s := range st.Services {
				if s.Port == "line" && s.Connections.Active > 0 {
					return fmt.Errorf("%s has %d connections", st.Node, s.Connections.Active)
				}
			}
		}
		return nil
	})
}

// namesTheLoop: a node's status says of both service ports that they are in a loop.
func (w *world) namesTheLoop(at *web.Client) {
	w.Helper()
	named := map[string]bool{}
	st, err := at.Status(w.ctx)
	w.must(err)
	for _, s := range st.Services {
		if strings.Contains(strings.Join(s.Problems, "\n"), "a loop") && s.Connections.Failed > 0 {
			named[s.Port] = true
		}
	}
	if !named["line"] || !named["datagram"] {
		w.Errorf("the loop is named of %v, want line and datagram", named)
	}
}

// TestTTLOfOne: what a client sends with a TTL of 1 goes no further, as a router has it: it is told so of a datagram. Its connection,
// which kproxy's kernel has taken by then, is reset.
func TestTTLOfOne(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.DataPlane = string(service.PreferUserspace)
	w.must(m.Write(w.manifests))
	w.start()
	for f, a := range m.ClusterIPs {
		to := netip.AddrPortFrom(a, 80)
		w.ask(w.net.Client, "udp", to)
		if err := w.oneHop("udp", service.Family(f), to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("udp to %s: %v, want the error of a time exceeded message", to, err)
		}
		if err := w.oneHop("tcp", service.Family(f), to); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("tcp to %s: %v, want a reset", to, err)
		}
		w.ask(w.net.Client, "tcp", to)
	}
	for _, port := range []string{"line", "datagram"} {
		if s := w.service("web", port); s.Connections.Failed != 2 || !strings.Contains(strings.Join(s.Problems, "\n"), "TTL of 1") {
			t.Errorf("%s: %d failed, %q; want 2 and the reason", port, s.Connections.Failed, s.Problems)
		}
	}
}

// oneHop sends a line with a TTL of 1 and waits for an answer.
func (w *world) oneHop(network string, f service.Family, to netip.AddrPort) error {
	w.Helper()
	return w.net.Client.Do(func() error {
		d := net.Dialer{Timeout: within(5 * time.Second), Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) {
				level, hops, errs := unix.SOL_IP, unix.IP_TTL, unix.IP_RECVERR
				if f == service.IPv6 {
					level, hops, errs = unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
				}
				if err = unix.SetsockoptInt(int(fd), level, hops, 1); err == nil && network == "udp" {
					err = unix.SetsockoptInt(int(fd), level, errs, 1)
				}
			}), err)
		}}
		c, err := d.DialContext(w.ctx, network, to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(within(5 * time.Second)))
		if _, err := fmt.Fprintln(c, "hello"); err != nil {
			return err
		}
		_, err = c.Read(make([]byte, 100))
		return err
	})
}
