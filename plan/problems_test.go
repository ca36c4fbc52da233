package plan

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

const (
	v4Off   = "IPv4 forwarding is off on this node (sysctl net.ipv4.ip_forward)"
	v6Off   = "IPv6 forwarding is off on this node (sysctl net.ipv6.conf.all.forwarding)"
	bothOff = "IPv4 forwarding and IPv6 forwarding are off on this node (sysctl net.ipv4.ip_forward and sysctl net.ipv6.conf.all.forwarding)"
	cannot  = ": clients on other hosts couldn't be served by the kernel"

	onlyNode = "only clients on this node are served while kproxy is down "
)

// forward says what the host forwards.
func forward(v4, v6 bool) func(*world) {
	return func(w *world) {
		w.in.Caps.Forwarding = [2]Capability{
			{Name: "IPv4 forwarding", Supported: v4, Reason: "sysctl net.ipv4.ip_forward"},
			{Name: "IPv6 forwarding", Supported: v6, Reason: "sysctl net.ipv6.conf.all.forwarding"},
		}
	}
}

func dualStack(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd96::1") }

var dualEndpoints = []string{"10.0.0.1 n1 ready", "fd00::1 n1 ready"}

func TestForwarding(t *testing.T) {
	sctp := func(p *service.Port) { p.Protocol = service.SCTP }
	leastConnections := func(p *service.Port) { p.Algorithm = service.LeastConnections }
	tests := []struct {
		name      string
		port      service.Port
		endpoints []string
		world     func(*world)
		plane     DataPlane
		reason    string
		degraded  string
		problems  []string
	}{
		{"everything forwards", port("a", dualStack), dualEndpoints, forward(true, true), IPTables, reasonQualified, "", nil},
		{"nobody looked", port("a", dualStack), dualEndpoints, program0, IPTables, reasonQualified, "", nil},
		{"no IPv6, dual stack", port("a", dualStack), dualEndpoints, forward(true, false), Userspace, v6Off + cannot, onlyNode + "(IPv6)", nil},
		{"no IPv4, dual stack", port("a", dualStack), dualEndpoints, forward(false, true), Userspace, v4Off + cannot, onlyNode + "(IPv4)", nil},
		{"neither, dual stack", port("a", dualStack), dualEndpoints, forward(false, false), Userspace, bothOff + cannot, onlyNode + "(IPv4 and IPv6)", nil},
		{"no IPv6, IPv4 only", port("a"), dualEndpoints[:1], forward(true, false), IPTables, reasonQualified, "", nil},
		{"neither, IPv4 only", port("a"), dualEndpoints[:1], forward(false, false), Userspace, v4Off + cannot, onlyNode + "(IPv4)", nil},
		{"no IPv6, where no frontend serves", port("a", dualStack), dualEndpoints[:1], forward(true, false), IPTables, reasonQualified, "", nil},
		{"pinned to the kernel", port("a", dualStack), dualEndpoints, do(forward(true, false), pinTo(service.PreferKernel)), Userspace, v6Off + cannot, onlyNode + "(IPv6)", nil},
		{"pinned to userspace", port("a", dualStack), dualEndpoints, do(forward(true, false), pinTo(service.PreferUserspace)), Userspace, "pinned to userspace by kproxy pin", onlyNode + "(IPv6)", nil},
		{"adopted", port("a", dualStack), dualEndpoints, do(forward(true, false), func(w *world) { w.in.Observed.Adopted[port("a").Key] = true }), Userspace, v6Off + cannot, onlyNode + "(IPv6)", nil},
		{"an algorithm besides", port("a", dualStack, leastConnections), dualEndpoints, forward(true, false), Userspace, "iptables can't do least connections",
			"least connections falls back to random choice while kproxy is down; " + onlyNode + "(IPv6)", nil},
		{"mode userspace", port("a", dualStack), dualEndpoints, do(forward(true, false), func(w *world) { w.in.Policy.Mode = ModeUserspace }), Userspace, "mode userspace offloads nothing", "", nil},
		{"SCTP", port("a", dualStack, sctp), dualEndpoints, forward(true, false), IPTables, reasonKernelOnly, "", []string{v6Off + ": clients on other hosts aren't served"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.in.Policy.OffloadAfter, w.in.Policy.OffloadMinConnections = 0, 0
			w.set(tt.port, tt.endpoints...)
			tt.world(w)
			w.one()
			w.program()
			s := w.one()
			if s.DataPlane != tt.plane || s.Reason != tt.reason {
				t.Errorf("%s (%s), want %s (%s)", s.DataPlane, s.Reason, tt.plane, tt.reason)
			}
			if s.Degraded != tt.degraded {
				t.Errorf("degraded %q, want %q", s.Degraded, tt.degraded)
			}
			if diff := cmp.Diff(tt.problems, s.Problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

var dual = do(change(dualStack), setTo(dualEndpoints...), forward(true, true))

// TestForwardingTimelines: what somebody does to the host's settings while
// kproxy runs.
func TestForwardingTimelines(t *testing.T) {
	for _, tt := range []timeline{
		{"off and on again while offloaded", dual, after(
			moment{at: 20, do: forward(true, false), plane: Userspace, state: StateUserspace, reason: v6Off + cannot},
			moment{at: 21, plane: Userspace, state: StateUserspace, reason: v6Off + cannot},
			moment{at: 30, do: forward(false, false), plane: Userspace, state: StateUserspace, reason: bothOff + cannot},
			// The rules stayed, and nothing else made it wait.
			moment{at: 40, do: forward(true, true), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		)},
		{"off from the start", do(dual, forward(true, false)), []moment{
			{at: 0, do: carry(1), plane: Userspace, state: StateUserspace, reason: v6Off + cannot},
			{at: 60, do: program, plane: Userspace, state: StateUserspace, reason: v6Off + cannot},
			{at: 61, do: forward(true, true), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		}},
		{"pinned to the kernel", do(dual, pinTo(service.PreferKernel)), []moment{
			{at: 0, do: program0, plane: Userspace, state: StatePinned, reason: reasonWriting},
			{at: 1, do: program, plane: IPTables, state: StatePinned, reason: "pinned to the kernel by kproxy pin"},
			{at: 2, do: forward(false, true), plane: Userspace, state: StateUserspace, reason: v4Off + cannot},
			{at: 3, do: forward(true, true), plane: IPTables, state: StatePinned, reason: "pinned to the kernel by kproxy pin"},
		}},
		{"the other family's", forward(true, true), after(
			moment{at: 20, do: forward(true, false), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		)},
		{"endpoints of the family that doesn't forward come and go", do(dual, setTo(dualEndpoints[0]), forward(true, false)), after(
			moment{at: 20, do: setTo(dualEndpoints...), plane: Userspace, state: StateUserspace, reason: v6Off + cannot},
			moment{at: 40, do: do(setTo(dualEndpoints[0])), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 50, wake: 50},
			moment{at: 50, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
			tt.prepare(w)
			for _, m := range tt.moments {
				w.play(m)
			}
		})
	}
}

// TestForwardingShared: while the host's settings stay, services are taken over
// from the previous plan.
func TestForwardingShared(t *testing.T) {
	w := newWorld(t)
	w.set(port("a", dualStack), dualEndpoints...)
	forward(true, false)(w)
	a, b := w.one(), w.one()
	if a != b {
		t.Errorf("settled again although nothing changed")
	}
}

// An endpoint at which its service answers keeps it in userspace where IPVS would
// get the connection to the endpoint as well, and nowhere else.
func TestEndpointIsTheServiceItself(t *testing.T) {
	for _, tt := range []struct {
		name     string
		endpoint string
		mode     Mode
		reason   string
	}{
		{"node port", "192.168.0.1:30080", ModeIPVS, "ipvs can't lead connections to endpoint 192.168.0.1:30080, where the service itself answers"},
		{"external address", "198.51.100.7:80", ModeIPVS, "ipvs can't lead connections to endpoint 198.51.100.7:80, where the service itself answers"},
		{"node port of another node", "192.168.0.9:30080", ModeIPVS, "waiting for its first connection"},
		{"another port", "192.168.0.1:80", ModeIPVS, "waiting for its first connection"},
		{"node port, iptables", "192.168.0.1:30080", ModeIPTables, "waiting for its first connection"},
	} {
		w := newWorld(t)
		in(tt.mode)(w)
		w.in.Caps = bothCaps
		w.in.Policy.NodeAddresses = addrs("192.168.0.1")
		w.set(port("a", func(p *service.Port) { p.NodePort, p.ExternalIPs = 30080, addrs("198.51.100.7") }), "10.0.0.1 n2 ready", tt.endpoint+" n1 ready")
		s := w.one()
		if s.Reason != tt.reason || s.DataPlane != Userspace {
			t.Errorf("%s: in %s: %s; want %s", tt.name, s.DataPlane, s.Reason, tt.reason)
		}
		if degraded := s.Degraded != ""; degraded != (tt.mode == ModeIPVS && s.State == StateUserspace) {
			t.Errorf("%s: degraded %q", tt.name, s.Degraded)
		}
	}
}
