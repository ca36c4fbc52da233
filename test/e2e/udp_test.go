package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// udpPlanes are the data planes that UDP is tested in.
var udpPlanes = []service.Preference{service.PreferUserspace, service.PreferKernel}

// talker is a client with one socket: to the kernel all it sends to one
// address is one flow.
type talker struct {
	*world
	conn   *net.UDPConn
	target netip.AddrPort
	count  int
}

// talk opens a socket to target.
func (w *world) talk(target netip.AddrPort) *talker {
	w.Helper()
	c, err := w.net.Client.Dial(w.ctx, "udp", target.String())
	w.must(err)
	w.Cleanup(func() { c.Close() })
	return &talker{world: w, conn: c.(*net.UDPConn), target: target}
}

// ask sends a datagram and returns who answered it, or the error: refused, or
// silence for so long on a machine of usual speed.
func (k *talker) ask(limit time.Duration) (lab.Answer, error) {
	k.count++
	payload := fmt.Sprintf("%s-%d", k.conn.LocalAddr(), k.count)
	if _, err := k.conn.Write([]byte(payload)); err != nil {
		return lab.Answer{}, err
	}
	buf := make([]byte, 1<<16)
	end := time.Now().Add(within(limit))
	for {
		k.must(k.conn.SetReadDeadline(end))
		n, err := k.conn.Read(buf)
		if err != nil {
			return lab.Answer{}, err
		}
		a, err := lab.ParseAnswer(string(buf[:n]))
		if err != nil || a.Payload == payload {
			return a, err
		} // else the late answer to an earlier one
	}
}

// becomes asks until the answer is as wanted. A datagram may be lost while
// something changes, a flow that is lost for good is what must not be.
func (k *talker) becomes(what string, want func(lab.Answer, error) bool) {
	k.Helper()
	k.eventually(10*time.Second, fmt.Sprintf("%s to %s", what, k.target), func() error {
		a, err := k.ask(250 * time.Millisecond)
		if want(a, err) {
			return nil
		}
		return fmt.Errorf("it was answered by %q, %v", a.Backend, err)
	})
}

func answered(_ lab.Answer, err error) bool { return err == nil }
func refused(_ lab.Answer, err error) bool  { return errors.Is(err, syscall.ECONNREFUSED) }
func unheard(_ lab.Answer, err error) bool  { return err != nil }

// by wants an answer by one of the backends.
func by(backends ...string) func(lab.Answer, error) bool {
	return func(a lab.Answer, err error) bool {
		return err == nil && strings.Contains(" "+strings.Join(backends, " ")+" ", " "+a.Backend+" ")
	}
}

// TestUDPFlowsFollowChanges: a client that keeps its port is answered by
// another endpoint when its own is removed, is refused when there is none left
// or the service is gone, and is answered again when there is one.
func TestUDPFlowsFollowChanges(t *testing.T) {
	t.Parallel()
	for _, plane := range udpPlanes {
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			m.DataPlane = string(plane)
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off")
			for _, target := range frontends(m) {
				t.Run(target.Addr().String(), func(t *testing.T) { w.followsChanges(t, m, target) })
			}
		})
	}
}

func (w *world) followsChanges(t *testing.T, m lab.Manifest, target netip.AddrPort) {
	var talkers []*talker
	serving := map[*talker]string{}
	for range 3 { // one for each endpoint
		k := w.talk(target)
		k.becomes("at first an answer", answered)
		a, err := k.ask(5 * time.Second)
		w.must(err)
		talkers, serving[k] = append(talkers, k), a.Backend
	}
	each := func(what string, want func(lab.Answer, error) bool) {
		for _, k := range talkers {
			k.becomes(what, want)
		}
	}
	w.must(m.Without("b1").Write(w.manifests))
	w.net.Backend("b1").Stop()
	for _, k := range talkers {
		k.becomes("after b1 was removed, an answer", by("b2", "b3"))
		if a, err := k.ask(5 * time.Second); serving[k] != "b1" && (err != nil || a.Backend != serving[k]) {
			t.Errorf("the flow to %s, which wasn't removed, is answered by %q, %v", serving[k], a.Backend, err)
		}
	}
	w.must(m.Without("b1", "b2", "b3").Write(w.manifests))
	each("scaled to zero, a refusal", refused)
	w.must(w.net.Backend("b1").Start(w.ctx))
	w.must(m.Write(w.manifests))
	each("scaled up, an answer", answered)

	w.must(os.Remove(m.Path(w.manifests)))
	w.gone("web")
	each("deleted, no answer", unheard)
	w.must(m.Write(w.manifests))
	each("created again, an answer", answered)
}

// TestUDPEndpointThatRefuses: the ICMP error of an endpoint that is gone, with
// nobody having said so, sends the flow elsewhere in userspace.
func TestUDPEndpointThatRefuses(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "datagram", service.PreferUserspace)
	for _, target := range frontends(m) {
		k := w.talk(target)
		a, err := k.ask(5 * time.Second)
		w.must(err)
		w.must(w.net.Backend(a.Backend).Fail(w.ctx, lab.Refuse))
		k.becomes("after "+a.Backend+" refuses, an answer by another", func(b lab.Answer, err error) bool {
			return err == nil && b.Backend != a.Backend
		})
		w.must(w.net.Backend(a.Backend).Fail(w.ctx, lab.Healthy))
	}
}

// TestUDPMovesBetweenDataPlanes: a client that keeps its port is served on
// after each move of its service.
func TestUDPMovesBetweenDataPlanes(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	both := []*talker{w.talk(frontends(m)[0]), w.talk(frontends(m)[1])}
	for range 2 {
		for _, plane := range udpPlanes {
			w.pin("web", "datagram", plane)
			for _, k := range both {
				k.becomes("after a move to "+string(plane)+", an answer", answered)
			}
		}
	}
}

// TestLargestDatagrams: 65,507 bytes, the most that UDP over IPv4 takes, go
// through in both data planes and families; and so do empty ones.
func TestLargestDatagrams(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	large := strings.Repeat("0123456789", lab.MaxDatagram/10+1)[:lab.MaxDatagram]
	for _, plane := range udpPlanes {
		w.pin("web", "datagram", plane)
		for _, target := range frontends(m) {
			for _, payload := range []string{large, large[:lab.MaxDatagram-1], large[:1500], "x", ""} {
				c, err := w.net.Client.Dial(w.ctx, "udp", target.String())
				w.must(err)
				_, err = c.Write([]byte(payload))
				w.must(err)
				w.must(c.SetReadDeadline(time.Now().Add(patience(10 * time.Second))))
				buf := make([]byte, 1<<16)
				n, err := c.Read(buf)
				c.Close()
				if err != nil {
					t.Errorf("%s to %s: %d bytes: %v", plane, target, len(payload), err)
					continue
				}
				// The answer is the name, the peer and the payload, cut to the maximum.
				parts := strings.SplitN(string(buf[:n]), " ", 3)
				if len(parts) != 3 || !strings.HasPrefix(payload, parts[2]) || n < min(len(payload), lab.MaxDatagram) {
					t.Errorf("%s to %s: %d bytes came back as %d others", plane, target, len(payload), n)
				}
			}
		}
	}
}

// TestOneSocketTwoServices: a client with one socket talks to two services at
// once, as resolvers do; each answer comes from the address it was asked at.
func TestOneSocketTwoServices(t *testing.T) {
	w := newWorld(t)
	a, b := newManifest("a", 10, w.net.Backends[0]), newManifest("b", 11, w.net.Backends[1])
	w.must(a.Write(w.manifests))
	w.must(b.Write(w.manifests))
	w.start()
	for _, plane := range udpPlanes {
		w.pin("a", "datagram", plane)
		w.pin("b", "datagram", plane)
		for f := range frontends(a) {
			c, err := w.net.Client.ListenPacket(w.ctx, "udp", netip.AddrPortFrom(w.net.Config.ClientAddresses(0)[f], 0).String())
			w.must(err)
			for i := range 20 {
				for backend, target := range map[string]netip.AddrPort{"b1": frontends(a)[f], "b2": frontends(b)[f]} {
					_, err := c.WriteTo(fmt.Appendf(nil, "%d-%s", i, backend), net.UDPAddrFromAddrPort(target))
					w.must(err)
				}
				for range 2 {
					w.must(c.SetReadDeadline(time.Now().Add(patience(10 * time.Second))))
					buf := make([]byte, 2000)
					n, from, err := c.ReadFrom(buf)
					if err != nil {
						t.Fatalf("%s, exchange %d: %v", plane, i, err)
					}
					got, err := lab.ParseAnswer(string(buf[:n]))
					w.must(err)
					want := map[string]string{"b1": frontends(a)[f].String(), "b2": frontends(b)[f].String()}[got.Backend]
					if from.String() != want || got.Payload != fmt.Sprintf("%d-%s", i, got.Backend) {
						t.Fatalf("%s, exchange %d: %s answered %q from %s, want from %s", plane, i, got.Backend, got.Payload, from, want)
					}
				}
			}
			c.Close()
		}
	}
}

// TestIdleSessionsEnd: a session that is silent for its idle timeout ends and
// takes nothing along: its client is served again when it speaks again.
func TestIdleSessionsEnd(t *testing.T) {
	w := newWorld(t)
	timeout := lasting(2 * time.Second)
	m := newManifest("web", 10, w.net.Backends...).Annotate("kproxy.dev/idle-timeout", timeout.String())
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "datagram", service.PreferUserspace)
	var idle []*talker
	for i := range 20 {
		k := w.talk(frontends(m)[i%2])
		k.becomes("an answer", answered)
		idle = append(idle, k)
	}
	busy := w.talk(frontends(m)[0])
	busy.becomes("an answer", answered)
	last, err := busy.ask(5 * time.Second)
	w.must(err)
	asked := time.Now()
	w.eventually(15*time.Second, "all but one session to end", func() error {
		a, err := busy.ask(5 * time.Second)
		late := time.Since(asked) > timeout // then it may have ended: this test had no processor
		asked = time.Now()
		if err != nil || a.Backend != last.Backend && !late {
			return fmt.Errorf("the busy session is answered by %q, %v", a.Backend, err)
		}
		last = a
		rows, err := w.client.Connections(w.ctx, "default/web:datagram")
		if err != nil {
			return err
		}
		sessions := 0
		for _, r := range rows {
			if r.DataPlane == plan.Userspace {
				sessions++
			}
		}
		if sessions != 1 {
			return fmt.Errorf("there are %d", sessions)
		}
		return nil
	})
	for _, k := range idle {
		k.becomes("after its session ended, an answer", answered)
	}
}
