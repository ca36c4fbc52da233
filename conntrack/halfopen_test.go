package conntrack

import (
	"slices"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func tcpKey(name string) service.Key {
	return service.Key{Namespace: "default", Name: name, Port: "p", Protocol: service.TCP}
}

// unusable takes the endpoint at pod host out of use.
func unusable(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; e.Address == at(service.FamilyOf(e.Address.Addr()), pods, host, 5353) {
				e.Usable = false
			}
		}
	}
}

// clusterOnly leaves the node port out.
func clusterOnly(s *plan.Service) {
	s.Frontends = slices.DeleteFunc(s.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
}

// TestHalfOpen: only connections are given up that wait for an endpoint which isn't
// used any more, or that began without a rule.
func TestHalfOpen(t *testing.T) {
	p := &plan.Plan{Services: []*plan.Service{
		serviceOf(tcpKey("web"), 10, unusable(3)),
		serviceOf(tcpKey("virtual"), 12, clusterOnly, func(s *plan.Service) { s.DataPlane = plan.IPVS }),
		serviceOf(tcpKey("closed"), 13, clusterOnly, func(s *plan.Service) {
			for i := range s.Frontends {
				s.Frontends[i].Verdict = plan.Reject
			}
		}),
	}}
	for _, f := range service.Families {
		waiting := Flow{
			Family: f, Protocol: service.TCP, TCPState: tcpSynSent,
			OrigSrc: at(f, clients, 2, 50000), OrigDst: at(f, services, 10, 53),
			ReplySrc: at(f, pods, 3, 5353), ReplyDst: at(f, clients, 2, 50000),
		}
		for _, tt := range []struct {
			name   string
			change func(*Flow)
			gone   bool
		}{
			{"waits for an endpoint that is down", func(*Flow) {}, true},
			{"waits for one that was removed", func(x *Flow) { x.ReplySrc = at(f, pods, 4, 5353) }, true},
			{"waits for one in use", func(x *Flow) { x.ReplySrc = at(f, pods, 2, 5353) }, false},
			{"to a node port", func(x *Flow) { x.OrigDst = at(f, nodes, 1, nodePort) }, true},
			{"is established", func(x *Flow) { x.TCPState, x.Status = 3, statusSeenReply }, false},
			{"was answered", func(x *Flow) { x.Status = statusSeenReply }, false},
			{"is UDP", func(x *Flow) { x.Protocol, x.TCPState = service.UDP, 0 }, false},
			{"goes to another service's address", func(x *Flow) { x.OrigDst = at(f, services, 11, 53) }, false},
			{"isn't rewritten", func(x *Flow) { x.ReplySrc = x.OrigDst }, true},
			{"isn't rewritten, but answered", func(x *Flow) { x.ReplySrc, x.Status = x.OrigDst, statusSeenReply }, false},
			{"isn't rewritten, and IPVS's", func(x *Flow) { x.OrigDst = at(f, services, 12, 53); x.ReplySrc = x.OrigDst }, false},
			{"isn't rewritten, and refused", func(x *Flow) { x.OrigDst = at(f, services, 13, 53); x.ReplySrc = x.OrigDst }, false},
			{"isn't rewritten, to no service", func(x *Flow) { x.OrigDst = at(f, services, 14, 53); x.ReplySrc = x.OrigDst }, false},
			{"is the forwarder's", func(x *Flow) { x.ReplySrc = at(f, nodes, 1, listener) }, false},
			{"is in a zone", func(x *Flow) { x.Zone = 1 }, false},
		} {
			x := waiting
			tt.change(&x)
			if got := len(HalfOpen([]Flow{x}, p, isLocal)) == 1; got != tt.gone {
				t.Errorf("%s, a connection that %s: given up %v, want %v", f, tt.name, got, tt.gone)
			}
		}
	}
}

func TestHalfOpenIn(t *testing.T) {
	planOf := func(change ...func(*plan.Service)) *plan.Plan {
		return &plan.Plan{Services: []*plan.Service{serviceOf(tcpKey("web"), 10, change...)}}
	}
	without := func(s *plan.Service) { s.Endpoints = s.Endpoints[:1] }
	for _, tt := range []struct {
		name     string
		old, now *plan.Plan
		want     bool
	}{
		{"at start", nil, planOf(), false},
		{"nothing changed", planOf(), planOf(), false},
		{"an endpoint went down", planOf(), planOf(unusable(2)), true},
		{"an endpoint was removed", planOf(), planOf(without), true},
		{"an endpoint came up", planOf(unusable(2)), planOf(), false},
		{"the service is gone", planOf(), &plan.Plan{}, false},
	} {
		if got := HalfOpenIn(plan.Between(tt.old, tt.now)) != [2]bool{}; got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
