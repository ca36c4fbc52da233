package nodehealth

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// world is Ports on real sockets of the loopback.
type world struct {
	plan *plan.Plan // last
	*testing.T
	h      *Ports
	policy plan.Policy

	mu     sync.Mutex
	events []string
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, policy: onlyAt("127.0.0.0/8", "::1/128")}
	w.h = New(serveCount, slog.New(slog.DiscardHandler), func(h plan.HealthPort, why string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.events = append(w.events, h.Name+": "+why)
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if len(w.h.open) > 0 {
			t.Errorf("%d servers left", len(w.h.open))
		}
	})
	return w
}

// onlyAt returns a policy by which node ports answer at a node's addresses of these networks.
func onlyAt(networks ...string) (p plan.Policy) {
	for _, n := range networks {
		p.NodePortNetworks = append(p.NodePortNetworks, netip.MustParsePrefix(n))
	}
	return p
}

// serveCount answers every connection with the Service's name and count.
func serveCount(ctx context.Context, l net.Listener, now func() plan.HealthPort) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		h := now()
		fmt.Fprintf(c, "%s %d\n", h.Name, h.Endpoints)
		c.Close()
	}
}

// want has the servers follow these Services, each with an endpoint here.
func (w *world) want(ports map[string]uint16) {
	p := &plan.Plan{Policy: w.policy}
	for _, name := range []string{"a", "b"} {
		if ports[name] == 0 {
			continue
		}
		s := &plan.Service{Port: &service.Port{
			Key: service.Key{Namespace: "ns", Name: name, Protocol: service.TCP}, HealthCheckNodePort: ports[name],
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		}}
		s.Endpoints = []plan.Endpoint{{Endpoint: &service.Endpoint{Address: netip.MustParseAddrPort("10.0.0.1:80"), Ready: true}, Local: true}}
		p.Services = append(p.Services, s)
	}
	w.h.Follow(p, plan.Between(w.plan, p))
	w.plan = p
}

// answers waits for an answer at a port of address; empty for none.
func (w *world) answers(address string, port uint16, want string) {
	w.Helper()
	var got string
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		got = ""
		if c, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(address), port).String()); err == nil {
			got, _ = bufio.NewReader(c).ReadString('\n')
			c.Close()
		}
		if got = strings.TrimSpace(got); got == want {
			return
		}
	}
	w.Errorf("%s port %d answers %q, want %q", address, port, got, want)
}

// freePorts finds ports that nothing listens on.
func freePorts(t *testing.T, n int) []uint16 {
	var out []uint16
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		out = append(out, uint16(l.Addr().(*net.TCPAddr).Port))
	}
	return out
}

// TestHealthPortsFollowThePlan: servers come and go with Services, in both
// families, each with its own count; a port passes from one Service to another.
func TestHealthPortsFollowThePlan(t *testing.T) {
	w := newWorld(t)
	p := freePorts(t, 2)
	w.want(map[string]uint16{"a": p[0]})
	w.answers("127.0.0.1", p[0], "a 1")
	w.answers("::1", p[0], "a 0")
	w.want(map[string]uint16{"a": p[1], "b": p[0]})
	w.answers("127.0.0.1", p[0], "b 1")
	w.answers("127.0.0.1", p[1], "a 1")
	w.policy = onlyAt("127.0.0.0/8", "fd00::/8") // which the node has no address in
	w.want(map[string]uint16{"b": p[0]})
	w.answers("::1", p[0], "")
	w.answers("127.0.0.1", p[1], "")
	w.answers("127.0.0.1", p[0], "b 1")
	w.policy = plan.Policy{} // all
	w.want(map[string]uint16{"b": p[0]})
	w.answers("::1", p[0], "b 0")
	w.answers("127.0.0.2", p[0], "b 1")
	w.want(nil)
	w.answers("127.0.0.1", p[0], "")
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.events) > 0 {
		t.Errorf("events %q, want none", w.events)
	}
}

// TestTakenHealthPort: the problem is in the status and in one event until the
// port is free, and then it is served.
func TestTakenHealthPort(t *testing.T) {
	w := newWorld(t)
	w.policy = onlyAt("127.0.0.0/8", "fd00::/8") // which the node has no address in
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(taken.Addr().(*net.TCPAddr).Port)
	wanted := map[string]uint16{"a": port}
	w.want(wanted)
	problem := func(want string) {
		t.Helper()
		var got []string
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			if got = w.h.ProblemsOf("ns", "a"); strings.Contains(strings.Join(got, "\n"), want) && (want == "") == (len(got) == 0) {
				return
			}
		}
		t.Errorf("problems %q, want %q", got, want)
	}
	problem("is taken by another program")
	w.want(wanted) // the next pass tries again, and says nothing new
	w.want(wanted)
	taken.Close()
	w.want(wanted)
	w.answers("127.0.0.1", port, "a 1")
	problem("")
	w.mu.Lock()
	if len(w.events) != 1 || !strings.Contains(w.events[0], "is taken by another program") {
		t.Errorf("events %q, want one", w.events)
	}
	w.mu.Unlock()

	w.want(map[string]uint16{"a": port, "b": port})
	w.answers("127.0.0.1", port, "a 1")
	for len(w.h.ProblemsOf("ns", "b")) == 0 {
		time.Sleep(5 * time.Millisecond)
	}
	if got := w.h.ProblemsOf("ns", "b")[0]; !strings.Contains(got, "belongs to ns/a") {
		t.Errorf("problem of b: %q, want whose the port is", got)
	}
}
