package plan

import (
	"testing"

	"kproxy.dev/kproxy/service"
)

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
