package e2e

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestOffloadByItself: a service starts in userspace, is offloaded once it has
// been steady and has carried a connection, and no connection notices.
func TestOffloadByItself(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	// Not before the first ones are held, however long that takes.
	w.start("--offload-after", within(3*time.Second).String(), "--offload-min-connections", strconv.Itoa(len(frontends(m))))
	if s := w.service("web", "line"); s.DataPlane != plan.Userspace || s.State != plan.StateQualifying {
		t.Fatalf("at first it is in %s, %s; want userspace, qualifying", s.DataPlane, s.State)
	}
	var held []*lab.Held
	for _, target := range frontends(m) {
		held = append(held, w.hold(target))
	}
	tr := w.traffic("tcp", frontends(m)[0], 50)
	w.await("web", "line", w.plane, plan.StateOffloaded)
	if s := w.service("web", "http"); s.DataPlane != plan.Userspace {
		t.Errorf("the port that carried nothing is in %s, want userspace", s.DataPlane)
	}
	for _, target := range frontends(m) {
		held = append(held, w.hold(target))
	}
	sleep(time.Second)
	w.unbroken("after the offload", held...)
	w.noneFailed("new connections across the offload", tr.Stop())
	w.carriedBy(held[:2], plan.Userspace)
	w.carriedBy(held[2:], w.plane)
}

// carriedBy checks in which data plane connections are, by `kproxy connections`.
func (w *world) carriedBy(held []*lab.Held, plane plan.DataPlane) {
	w.Helper()
	rows, err := w.client.Connections(w.ctx, "default/web:line")
	w.must(err)
	for _, h := range held {
		i := slices.IndexFunc(rows, func(r plan.ConnectionStatus) bool { return r.Client == h.LocalAddr() })
		switch {
		case i < 0:
			w.Errorf("the connection from %s isn't listed", h.LocalAddr())
		case rows[i].DataPlane != plane:
			w.Errorf("the connection from %s is in %s, want %s", h.LocalAddr(), rows[i].DataPlane, plane)
		case rows[i].BytesIn == 0 || rows[i].BytesOut == 0:
			w.Errorf("the connection from %s has carried %d bytes in and %d out, want some", h.LocalAddr(), rows[i].BytesIn, rows[i].BytesOut)
		}
	}
}

// TestTwentyCyclesAndAKill: new connections keep coming while the service moves
// 20 times to the kernel and back (6 on a slow machine), and while kproxy is killed: none fails once
// the alive time-out is over, and connections that the kernel carries live on.
func TestTwentyCyclesAndAKill(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	tcp4, tcp6 := w.traffic("tcp", frontends(m)[0], 60), w.traffic("tcp", frontends(m)[1], 60)
	udp := w.traffic("udp", frontends(m)[0], 30)
	var kernel, userspace []*lab.Held
	cycles := 20
	if slow > 1 {
		cycles = 6 // which are two connections of each, of both families
	}
	for cycle := range cycles {
		w.pin("web", "line", service.PreferKernel)
		w.pin("web", "datagram", service.PreferKernel)
		if cycle%5 == 0 {
			kernel = append(kernel, w.hold(frontends(m)[cycle/5%2]))
		}
		sleep(150 * time.Millisecond)
		w.pin("web", "line", service.PreferUserspace)
		w.pin("web", "datagram", service.PreferUserspace)
		if cycle%5 == 0 {
			userspace = append(userspace, w.hold(frontends(m)[cycle/5%2]))
		}
		sleep(150 * time.Millisecond)
	}
	w.unbroken("opened in the kernel, after all cycles", kernel...)
	w.unbroken("opened in userspace, after all cycles", userspace...)
	for _, tr := range []*lab.Traffic{tcp4, tcp6, udp} {
		w.noneFailed("across all cycles", tr.Results())
	}

	w.must(w.proxy.Kill())
	sleep(3*time.Second + 300*time.Millisecond) // longer than --alive-timeout
	dead := time.Now()
	sleep(2 * time.Second)
	w.unbroken("opened in the kernel, after kill -9", kernel...)
	for _, tr := range []*lab.Traffic{tcp4, tcp6, udp} {
		w.noneFailed("while kproxy is dead", tr.Results().Since(dead))
	}

	w.startAgain()
	w.pin("web", "line", service.PreferKernel)
	sleep(500 * time.Millisecond)
	for _, tr := range []*lab.Traffic{tcp4, tcp6, udp} {
		w.noneFailed("until after the restart", tr.Stop().Since(dead))
	}
	w.unbroken("opened in the kernel, after the restart", kernel...)
}

// TestHangIsNoOutage: a kproxy that hangs stops its heartbeat, and new
// connections take the kernel's rules.
func TestHangIsNoOutage(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--alive-timeout", lasting(2*time.Second).String())
	w.pin("web", "line", service.PreferKernel) // whose rules are there then
	w.pin("web", "line", service.PreferUserspace)
	w.node("kill", "-STOP", strconv.Itoa(w.proxy.PID()))
	sleep(2500 * time.Millisecond)
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
	}
	w.node("kill", "-CONT", strconv.Itoa(w.proxy.PID()))
	w.eventually(10*time.Second, "the heartbeat to be back", func() error { return w.carries(frontends(m)[0], plan.Userspace) })
}

// TestRestartIsHitless: SIGTERM and a new start cost no connection, and what
// was offloaded stays so.
func TestRestartIsHitless(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(newManifest("other", 11, w.net.Backends...).Write(w.manifests))
	w.start("--drain-timeout", lasting(2*time.Second).String())
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
	inKernel := w.hold(frontends(m)[0])
	other := newManifest("other", 11, w.net.Backends...)
	tr, slow := w.traffic("tcp", frontends(m)[0], 60), w.traffic("tcp", frontends(other)[1], 60)
	restarts := 3
	if pace > 1 { // slow is traffic here
		restarts = 1
	}
	for range restarts {
		sleep(300 * time.Millisecond)
		w.stop()
		sleep(300 * time.Millisecond)
		w.startAgain()
		if s := w.service("web", "line"); s.DataPlane != w.plane {
			t.Errorf("after the restart it is in %s, %s: %s; want it still offloaded", s.DataPlane, s.State, s.Reason)
		}
	}
	w.noneFailed("an offloaded service across restarts", tr.Stop())
	w.noneFailed("a service in userspace across restarts", slow.Stop())
	w.unbroken("across restarts", inKernel)
}

// TestPinsSurviveARestart, as does the way back.
func TestPinsSurviveARestart(t *testing.T) {
	w := newWorld(t)
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	w.start("--offload-min-connections", "1", "--offload-after", "0s")
	w.pin("web", "line", service.PreferUserspace)
	w.stop()
	w.startAgain()
	w.await("web", "line", plan.Userspace, plan.StatePinned)
	w.pin("web", "line", service.PreferAuto)
	w.ask(w.net.Client, "tcp", frontends(newManifest("web", 10, w.net.Backends...))[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
}

// TestAffinityAcrossMoves: a client keeps its endpoint in every data plane and
// across moves, by every address of the service.
func TestAffinityAcrossMoves(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Affinity = time.Hour
	w.must(m.Write(w.manifests))
	w.start()
	first := map[netip.Addr]string{}
	for i, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel, service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		if i == 1 && w.plane == plan.IPVS { // which has its own choice, and keeps to it from then on
			clear(first)
		}
		for family, target := range frontends(m) {
			for client := range w.net.Config.Clients {
				local := w.net.Config.ClientAddresses(client)[family]
				for range 5 {
					a, err := w.net.Client.AskFrom(w.ctx, local, "tcp", target, "hello")
					w.must(err)
					if _, known := first[local]; !known {
						first[local] = a.Backend
					}
					if a.Backend != first[local] {
						t.Fatalf("client %s came to %s in %s, want it to stay with %s", local, a.Backend, plane, first[local])
					}
				}
			}
		}
	}
}

// TestWhatTheKernelCantDoStays: iptables has no rule for least connections, and
// IPVS no scheduler for random, so such a service stays in userspace, and says why.
func TestWhatTheKernelCantDoStays(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Algorithm = string(service.LeastConnections)
	if w.plane == plan.IPVS {
		m.Algorithm = string(service.Random)
	}
	w.must(m.Write(w.manifests))
	w.start("--offload-after", "0s", "--mode", string(w.plane)) // auto would find another data plane for it
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
	}
	sleep(time.Second)
	if s := w.service("web", "line"); s.DataPlane != plan.Userspace || s.State != plan.StateUserspace || !strings.Contains(s.Reason, strings.ReplaceAll(m.Algorithm, "-", " ")) {
		t.Errorf("it is in %s, %s (%s); want userspace because of %s", s.DataPlane, s.State, s.Reason, m.Algorithm)
	}
}

// TestLeastConnectionsInUserspace really balances by load.
func TestLeastConnectionsInUserspace(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Algorithm, m.DataPlane = string(service.LeastConnections), string(service.PreferUserspace)
	w.must(m.Write(w.manifests))
	w.start()
	counts := map[string]int{}
	for range 9 {
		counts[w.hold(frontends(m)[0]).First().Backend]++
	}
	if counts["b1"] != 3 || counts["b2"] != 3 || counts["b3"] != 3 {
		t.Errorf("9 connections that are held went %v, want 3 each", counts)
	}
}

var errOtherPlane = errors.New("another data plane carries it")

// carries returns nil when a new connection to target is carried by plane.
func (w *world) carries(target netip.AddrPort, plane plan.DataPlane) error {
	ctx, cancel := context.WithTimeout(w.ctx, within(2*time.Second))
	defer cancel()
	h, err := lab.Hold(ctx, lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: target, Timeout: within(2 * time.Second)})
	if err != nil {
		return err
	}
	defer h.Close()
	rows, err := w.client.Connections(ctx, "")
	if err != nil {
		return err
	}
	for _, r := range rows {
		if r.Client == h.LocalAddr() && r.DataPlane == plane {
			return nil
		}
	}
	return errOtherPlane
}
