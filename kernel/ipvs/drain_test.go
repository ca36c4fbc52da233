package ipvs_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// drainWorld is a client on host 1, and an endpoint each on hosts 2 and 3.
func drainWorld(t *testing.T) (*kerneltest.Network, *host) {
	t.Helper()
	needsIPVS(t)
	n := kerneltest.NewNetwork(t, 3)
	n.Serve(2, "two", 8080)
	n.Serve(3, "three", 8080)
	h := newHost(t)
	release, err := kernel.Release()
	h.must(err)
	_, err = kernel.EnsureSysctls(ipvs.Sysctls(release, false))
	h.must(err)
	return n, h
}

// of is what differs between the families.
var of = [2]struct {
	vip, bare, two, three, drain, vips string
}{
	service.IPv4: {"10.96.0.10:80", "10.96.0.10", "10.2.0.2:8080", "10.3.0.2:8080", "10.96.0.10,tcp:80,10.3.0.2", "KPROXY-VIP-4"},
	service.IPv6: {"[fd00:96::a]:80", "fd00:96::a", "[fd00:2::2]:8080", "[fd00:3::2]:8080", "fd00:96::a,tcp:80,fd00:3::2", "KPROXY-VIP-6"},
}

func TestDrainOfAnEndpoint(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			n, h := drainWorld(t)
			x, set := of[f], kernel.FamilySet(kernel.SetDrain, f)
			both, one := ruleset(virtual(service.TCP, x.vip, x.two, x.three)), ruleset(virtual(service.TCP, x.vip, x.two))
			h.bring(both)
			c := holdAt(t, n, x.vip, "three")

			h.bring(one)
			h.expect("table while a connection is open", fmt.Sprintf("tcp %s %s=1 %s=0", x.vip, x.two, x.three), h.servers())
			h.expect("record", x.drain, h.entries(set))
			h.expect("the connection", "three", c.ask())
			for range 4 {
				h.expect("a new connection", "two", hold(t, n, x.vip).ask())
			}
			if left := h.drain(); left != 1 {
				t.Errorf("%d left while a connection is open", left)
			}

			// It returns, with the connection that it had.
			h.bring(both)
			h.expect("table after its return", fmt.Sprintf("tcp %s %s=1 %s=1", x.vip, x.two, x.three), h.servers())
			h.expect("record after its return", "", h.entries(set))
			h.expect("the connection after its return", "three", c.ask())
			if left := h.drain(); left != 0 {
				t.Errorf("%d left after its return", left)
			}
			holdAt(t, n, x.vip, "three").cut()

			// It goes again, and kproxy is restarted meanwhile.
			h.bring(one)
			h.restart()
			if left := h.drain(); left != 1 {
				t.Errorf("%d left after a restart", left)
			}
			h.bring(one)
			h.expect("table after a restart", fmt.Sprintf("tcp %s %s=1 %s=0", x.vip, x.two, x.three), h.servers())
			h.expect("the connection after a restart", "three", c.ask())

			c.cut()
			h.expect("end of the drain", "", h.drained())
			h.expect("table in the end", fmt.Sprintf("tcp %s %s=1", x.vip, x.two), h.servers())
			h.expect("record in the end", "", h.entries(set))
		})
	}
}

// drained waits until nothing drains any more.
func (h *host) drained() string {
	for end := time.Now().Add(drainTimeout / 2); time.Now().Before(end); time.Sleep(time.Second) {
		if h.drain() == 0 {
			return ""
		}
	}
	return h.servers()
}

func TestDrainIsBounded(t *testing.T) {
	n, h := drainWorld(t)
	x := of[service.IPv4]
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two, x.three)))
	c := holdAt(t, n, x.vip, "three")
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two)))
	h.now = time.Now().Add(drainTimeout - 5*time.Second)
	if left := h.drain(); left != 1 {
		t.Errorf("%d left before the time is up", left)
	}
	h.expect("the connection before the time is up", "three", c.ask())
	h.now = h.now.Add(10 * time.Second)
	if left := h.drain(); left != 0 {
		t.Errorf("%d left when the time is up", left)
	}
	if answer := c.ask(); answer == "three" {
		t.Error("the connection lives on when the time is up")
	}
	h.expect("table", fmt.Sprintf("tcp %s %s=1", x.vip, x.two), h.servers())
	h.expect("record", "", h.entries("KPROXY-DRAIN-4"))
}

// TestDrainOfAnotherRun: the deadline is the kernel's to remember, by what an
// entry has to live yet.
func TestDrainOfAnotherRun(t *testing.T) {
	n, h := drainWorld(t)
	x := of[service.IPv4]
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two, x.three)))
	c := holdAt(t, n, x.vip, "three")
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two)))
	for _, way := range []struct {
		name string
		left time.Duration // of the drain
		want int
	}{{"time left", 10 * time.Second, 1}, {"time up", -10 * time.Second, 0}} {
		lives := uint32((way.left + ipvs.DrainSlack*time.Second) / time.Second)
		h.must(h.sets.Add(ipvs.Sets()[0], lives, x.drain))
		h.restart()
		h.expect(way.name+": the connection", "three", c.ask())
		if left := h.drain(); left != way.want {
			t.Errorf("%s: %d left", way.name, left)
		}
	}
	h.expect("table", fmt.Sprintf("tcp %s %s=1", x.vip, x.two), h.servers())
}

func TestDrainOfAService(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			n, h := drainWorld(t)
			x := of[f]
			h.bring(ruleset(virtual(service.TCP, x.vip, x.two, x.three)))
			c := holdAt(t, n, x.vip, "three")
			h.bring(kernel.Ruleset{})
			h.expect("table", fmt.Sprintf("tcp %s %s=0", x.vip, x.three), h.servers())
			h.expect("address", x.bare, h.addresses())
			h.expect("record of the address", x.bare, h.entries(x.vips))
			h.expect("the connection", "three", c.ask())
			if have, err := h.Observe(t.Context()); err != nil || len(have.Virtuals)+len(have.Addresses) > 0 {
				t.Errorf("Observe = %+v, %v: what drains is no part of it", have, err)
			}
			h.restart()
			if left := h.drain(); left != 1 {
				t.Errorf("%d left after a restart", left)
			}
			h.expect("the connection after a restart", "three", c.ask())
			h.now = time.Now().Add(drainTimeout + time.Second)
			if left := h.drain(); left != 0 {
				t.Errorf("%d left when the time is up", left)
			}
			h.expect("table in the end", "", h.servers())
			h.expect("address in the end", "no link", h.addresses())
			h.bring(kernel.Ruleset{})
			if left, err := h.sets.List(nil); err != nil || len(left) > 0 {
				t.Errorf("sets in the end: %v, %v", left, err)
			}
		})
	}
}

// TestListedEndpoints: one that isn't usable now, but still listed, keeps its
// connections as long as it takes.
func TestListedEndpoints(t *testing.T) {
	n, h := drainWorld(t)
	x := of[service.IPv4]
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two, x.three)))
	c := holdAt(t, n, x.vip, "three")
	h.bring(ruleset(virtual(service.TCP, x.vip, x.two, x.three+"=0")))
	h.now = time.Now().Add(time.Hour)
	if left := h.drain(); left != 0 {
		t.Errorf("%d drain", left)
	}
	h.expect("the connection", "three", c.ask())
	h.expect("table", fmt.Sprintf("tcp %s %s=1 %s=0", x.vip, x.two, x.three), h.servers())
}

// TestUDPGoesElsewhere: UDP doesn't drain; the same client's next datagrams
// reach another endpoint.
func TestUDPGoesElsewhere(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			needsIPVS(t)
			n := kerneltest.NewNetwork(t, 3)
			n.Serve(2, "two", 8080)
			n.Serve(3, "three", 8080)
			h := newHost(t)
			_, err := kernel.EnsureSysctls(ipvs.Sysctls("6.1.0", false))
			h.must(err)
			x := of[f]
			h.bring(ruleset(virtual(service.UDP, x.vip, x.three)))
			var c net.Conn
			n.On(1, func() { c, err = net.Dial("udp", x.vip) })
			h.must(err)
			defer c.Close()
			ask := func() string {
				buf := make([]byte, 64)
				for range 20 { // the one that ends the flow is lost
					_ = c.SetDeadline(time.Now().Add(time.Second))
					if _, err := c.Write([]byte("?")); err != nil {
						continue
					}
					if n, err := c.Read(buf); err == nil {
						var name string
						_, _ = fmt.Sscan(string(buf[:n]), &name)
						return name
					}
				}
				return "no answer"
			}
			h.expect("first endpoint", "three", ask())
			h.bring(ruleset(virtual(service.UDP, x.vip, x.two)))
			h.expect("table", fmt.Sprintf("udp %s %s=1", x.vip, x.two), h.servers())
			h.expect("then", "two", ask())
			h.bring(kernel.Ruleset{})
			h.expect("table in the end", "", h.servers())
			h.expect("address in the end", "no link", h.addresses())
		})
	}
}
