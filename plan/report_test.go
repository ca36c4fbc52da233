package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

func TestEvents(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
	w.set(port("b", func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.2") }), "10.0.0.1 n1 ready")
	step := func(name string, change func(*world), want ...string) {
		t.Helper()
		w.in.Now = w.in.Now.Add(15 * time.Second)
		if change != nil {
			change(w)
		}
		p := w.compute()
		var got []string
		for _, e := range w.delta.Events(p.Time) {
			if !e.Time.Equal(p.Time) {
				t.Errorf("%s: event at %v, want %v", name, e.Time, p.Time)
			}
			got = append(got, fmt.Sprintf("%s %s: %s", e.Kind, e.Service, e.Message))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	step("first plan", nil,
		"dataplane ns/a: added, userspace: waiting for its first connection",
		"dataplane ns/b: added, userspace: waiting for its first connection")
	step("nothing", nil)
	step("offload", do(carry(1), program), "dataplane ns/a: userspace to iptables: qualified")
	step("a death", func(w *world) {
		w.health("a", "10.0.0.2", health.Down, w.in.Now)
	},
		"dataplane ns/a: iptables to userspace: kernel rules are being updated",
		"health ns/a: 10.0.0.2:8080 is down")
	step("rules caught up", program, "dataplane ns/a: userspace to iptables: qualified")
	step("failure", failNow, "dataplane ns/a: iptables to userspace: "+noMemory)
	step("failure over, no endpoints", func(w *world) { clear(w.in.Failed); w.eps[port("b").Key] = nil },
		"dataplane ns/a: userspace to iptables: qualified",
		"dataplane ns/b: userspace to none: it has no endpoints")
	step("removed", func(w *world) { delete(w.ports, port("b").Key) }, "dataplane ns/b: removed")
}

func TestRow(t *testing.T) {
	w := newWorld(t)
	w.in.Observed.Carried[port("a").Key] = 1
	w.set(port("a", external, func(p *service.Port) {
		p.ClusterIPs, p.ExternalIPs = addrs("10.96.0.1"), addrs("10.1.0.1")
		p.Algorithm = service.LeastConnections
	}), "10.0.0.1 n1 ready", "10.0.0.2 n2 terminating weight:0")
	w.set(port("b", func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.2") }), "10.0.0.3 n2 ready")
	w.in.Observed.Carried[port("b").Key] = 1
	w.health("a", "10.0.0.1", health.Up, t0)
	p := w.compute()
	at := t0.Add(4 * time.Second)
	want := ServiceStatus{
		Namespace: "ns", Name: "a", Protocol: "TCP",
		Addresses: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:80"), netip.MustParseAddrPort("10.96.0.1:80")},
		NodePort:  30080, Algorithm: "least-connections",
		DataPlane: Userspace, State: StateUserspace, Reason: "iptables can't do least connections", Cause: CauseInexpressible,
		Kernel: IPTables, Degraded: "least connections falls back to random choice while kproxy is down",
		Endpoints: []EndpointStatus{
			{Address: endpoint("10.0.0.1").Address, Node: "n1", Ready: true, Serving: true, Local: true, Weight: 1, Health: "up", Since: t0, Usable: true},
			{Address: endpoint("10.0.0.2").Address, Node: "n2", Terminating: true, Health: "unknown"},
		},
	}
	if diff := cmp.Diff(want, p.Services[0].Row(at), compareAddrs); diff != "" {
		t.Errorf("row (-want +got):\n%s", diff)
	}
	if got := p.Services[1].Row(at).QualifiesInSeconds; got != 6 {
		t.Errorf("qualifies in %v s, want 6", got)
	}
}

func TestShorten(t *testing.T) {
	service := func(name, node string, usable bool) ServiceStatus {
		return ServiceStatus{Namespace: "ns", Name: name, Endpoints: []EndpointStatus{{Node: node, Usable: usable}}}
	}
	st := Status{Services: []ServiceStatus{service("a", "n1", true), service("b", "n2", true), service("c", "n2", true), service("d", "n1", false)}}
	whole := st
	whole.Shorten(4)
	if len(whole.Services) != 4 || whole.Services[0].Name != "d" || whole.Others != nil {
		t.Errorf("of four, four: %+v", whole)
	}
	short := st
	short.Shorten(2)
	if len(short.Services) != 2 || short.Services[0].Name != "d" || short.Services[1].Name != "a" {
		t.Errorf("two of four are %+v, want the one in trouble, then the first", short.Services)
	}
	if diff := cmp.Diff([]string{"ns/b", "n2", "ns/c"}, short.Others); diff != "" {
		t.Errorf("others (-want +got):\n%s", diff)
	}
	if st.Services[0].Name != "a" {
		t.Error("the status it was copied from has changed")
	}
}

func TestTargets(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.2 n1 ready", "10.0.0.1 n1 ready", "10.0.0.3 n1", "10.0.0.4 n2 serving terminating")
	w.set(port("b"), "10.0.0.1 n1 ready") // shares its probe with a
	w.set(port("c", func(p *service.Port) {
		p.Health = service.HealthCheck{Kind: service.CheckHTTP, Path: "/ok", Fall: 9}
	}), "10.0.0.1 n1 ready")
	w.set(port("d", func(p *service.Port) { p.Health.Kind = service.CheckOff }), "10.0.0.5 n1 ready")
	w.set(port("e", func(p *service.Port) { p.Protocol = service.UDP }), "10.0.0.6 n1 ready")
	w.set(port("f", func(p *service.Port) { p.Protocol, p.Health.Kind = service.UDP, service.CheckUDP }), "10.0.0.7 n1 ready")
	var got []string
	for _, target := range Targets(w.snapshot(), testHealth) {
		c := target.Check
		got = append(got, fmt.Sprintf("%s %s %s%s %d/%d", target.Protocol, target.Address.Addr(), c.Kind, c.Path, c.Rise, c.Fall))
	}
	want := []string{
		"tcp 10.0.0.1 http/ok 2/9", "tcp 10.0.0.1 tcp 2/3", "tcp 10.0.0.2 tcp 2/3", "tcp 10.0.0.4 tcp 2/3", "udp 10.0.0.7 udp 2/3",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("targets (-want +got):\n%s", diff)
	}
	if got := Targets(nil, testHealth); got != nil {
		t.Errorf("targets of nothing: %v", got)
	}
}

// TestEmpty: Compute works with nothing at all.
func TestEmpty(t *testing.T) {
	p, _ := Compute(nil, Inputs{Now: t0})
	if len(p.Services) != 0 || p.Find(port("a").Key) != nil || p.Offloads() || !p.Wake.IsZero() {
		t.Errorf("plan of nothing: %+v", p)
	}
}

// TestSameTargets: a change of what nobody probes leaves the probes as they are.
func TestSameTargets(t *testing.T) {
	off := testHealth
	off.Kind = service.CheckOff
	probed := port("a")
	probed.Health.Kind = service.CheckTCP
	for _, tt := range []struct {
		name   string
		health health.Defaults
		change func(*world)
		want   bool
	}{
		{"nothing", testHealth, func(*world) {}, true},
		{"endpoints that are probed", testHealth, func(w *world) { w.set(port("a"), "10.0.0.2") }, false},
		{"endpoints that aren't", off, func(w *world) { w.set(port("a"), "10.0.0.2") }, true},
		{"it asks to be probed", off, func(w *world) { w.set(probed, "10.0.0.1") }, false},
		{"a service comes", off, func(w *world) { w.set(probed, "10.0.0.1"); w.set(port("b"), "10.0.0.3") }, false},
	} {
		w := newWorld(t)
		w.set(port("a"), "10.0.0.1")
		w.compute()
		was := w.snapshot()
		tt.change(w)
		is := w.snapshot()
		w.compute()
		got := w.delta.SameTargets(tt.health)
		if got != tt.want || got && !slices.Equal(Targets(was, tt.health), Targets(is, tt.health)) {
			t.Errorf("%s: the targets are the same: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestChecksThatNodesRefuse: a Service that asks for more probes than its node
// makes for it is served, and told.
func TestChecksThatNodesRefuse(t *testing.T) {
	w := newWorld(t)
	w.set(port("a", func(p *service.Port) { p.Health.Interval = time.Millisecond }), "10.0.0.1 n1 ready")
	in := w.inputs()
	bounded := testHealth
	bounded.MinInterval = time.Second
	in.Health = health.NewView(bounded, nil)
	p, _ := Compute(nil, in)
	want := []string{"its health checks are 1s apart, not 1ms as it asks: that is the least on this node (--health-min-interval)"}
	if diff := cmp.Diff(want, p.Services[0].Problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	if got := Targets(in.Snapshot, bounded); len(got) != 1 || got[0].Check.Interval != time.Second {
		t.Errorf("targets %v, want one that is probed every second", got)
	}
}
