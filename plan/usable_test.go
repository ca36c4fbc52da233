package plan

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

func TestHealthAndWeights(t *testing.T) {
	wrr := func(p *service.Port) { p.Algorithm = service.WeightedRoundRobin }
	tests := []struct {
		name      string
		port      []func(*service.Port)
		endpoints []string
		down      []string
		unknown   []string // else up
		cluster   []Backend
		reason    string
	}{
		{name: "the one that is down is left out", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.2").Address, Weight: 1}}, reason: firstOne},
		{name: "what isn't known is used", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1"}, unknown: []string{"10.0.0.2"},
			cluster: []Backend{{Address: endpoint("10.0.0.2").Address, Weight: 1}}, reason: firstOne},
		{name: "all down", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1", "10.0.0.2"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}, {Address: endpoint("10.0.0.2").Address, Weight: 1}},
			reason:  "all 2 endpoints are down: serving as if all were up"},
		{name: "the only one down", endpoints: []string{"10.0.0.1 ready"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}}, reason: "its only endpoint is down: serving as if it were up"},
		{name: "one that drains doesn't keep a dead one from serving", port: []func(*service.Port){wrr},
			endpoints: []string{"10.0.0.1 ready weight:3", "10.0.0.2 ready weight:0"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 3}, {Address: endpoint("10.0.0.2").Address}},
			reason:  "its only endpoint is down: serving as if it were up"},
		{name: "weights count where the algorithm knows them", port: []func(*service.Port){wrr}, endpoints: []string{"10.0.0.1 ready weight:3"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 3}}, reason: firstOne},
		{name: "round robin knows 0 only", endpoints: []string{"10.0.0.1 ready weight:3", "10.0.0.2 ready weight:0"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}, {Address: endpoint("10.0.0.2").Address}}, reason: firstOne},
		{name: "weight 0 everywhere", endpoints: []string{"10.0.0.1 ready weight:0"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address}}, reason: "all its endpoints have weight 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a", tt.port...), tt.endpoints...)
			for _, e := range endpoints(tt.endpoints...) {
				w.health("a", e.Address.Addr().String(), health.Up, t0)
			}
			for _, a := range tt.down {
				w.health("a", a, health.Down, t0)
			}
			for _, a := range tt.unknown {
				w.health("a", a, health.Unknown, t0)
			}
			s := w.one()
			if diff := cmp.Diff(tt.cluster, s.Groups[service.IPv4].Cluster, compareAddrs); diff != "" {
				t.Errorf("backends (-want +got):\n%s", diff)
			}
			if s.Reason != tt.reason {
				t.Errorf("reason %q, want %q", s.Reason, tt.reason)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name      string
		port      []func(*service.Port)
		endpoints []string
		want      string
	}{
		{"none", nil, nil, "it has no endpoints"},
		{"one unready", nil, []string{"10.0.0.1 n1"}, "its only endpoint isn't ready"},
		{"some unready", nil, []string{"10.0.0.1 n1", "10.0.0.2 n1"}, "none of its 2 endpoints is ready"},
		{"drained", nil, []string{"10.0.0.1 n1 ready weight:0"}, "all its endpoints have weight 0"},
		{"elsewhere", []func(*service.Port){iTPLocal}, []string{"10.0.0.1 n2 ready"}, "its traffic policy is Local and no endpoint on this node takes connections"},
		{"other family", nil, []string{"fd00::1 n2 ready"}, "it has no endpoint of its addresses' family"},
		{"no address", []func(*service.Port){func(p *service.Port) { p.ClusterIPs = nil }}, []string{"10.0.0.1 n2 ready"}, "it has no address"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a", tt.port...), tt.endpoints...)
			if s := w.one(); s.Reason != tt.want || s.State != StateRejecting {
				t.Errorf("%s (%s), want rejecting (%s)", s.State, s.Reason, tt.want)
			}
		})
	}
}

// TestLeaves: whoever may still have connections, but gets no new ones.
func TestLeaves(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Endpoint)
		want   bool
	}{
		{"for another zone", func(*Endpoint) {}, false},
		{"in use", func(e *Endpoint) { e.Usable = true }, false},
		{"not ready", func(e *Endpoint) { e.Ready = false }, true},
		{"terminating", func(e *Endpoint) { e.Terminating = true }, true},
		{"down", func(e *Endpoint) { e.Health = downText }, true},
		{"drained by its weight", func(e *Endpoint) { e.Weight = 0 }, true},
		{"of another proxy", func(e *Endpoint) { e.Ready, e.Excluded = false, true }, false},
	} {
		e := Endpoint{Endpoint: &service.Endpoint{Ready: true, Serving: true, Weight: 1}, Probed: &Probed{Health: "up"}}
		tt.change(&e)
		if got := e.Leaves(); got != tt.want {
			t.Errorf("%s: leaves %v, want %v", tt.name, got, tt.want)
		}
	}
}
