package plan

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/service"
)

func TestHealthOfUserspace(t *testing.T) {
	for _, tt := range []struct {
		status Status
		want   string
	}{
		{Status{}, "NOT SERVING"},
		{Status{Alive: true}, "alive"},
		{Status{Alive: true, Exhausted: []Resource{Descriptors}}, "EXHAUSTED: descriptors"},
		{Status{Alive: true, Exhausted: []Resource{Sessions, Memory}}, "EXHAUSTED: sessions, memory"},
		{Status{Exhausted: []Resource{Sessions}}, "NOT SERVING"},
	} {
		if got := tt.status.Health(); got != tt.want {
			t.Errorf("%+v is %q, want %q", tt.status, got, tt.want)
		}
	}
}

// checked gives a service port a health-check node port.
func checked(number uint16, change ...func(*service.Port)) func(*service.Port) {
	return func(p *service.Port) {
		p.HealthCheckNodePort, p.ExternalLocal, p.ExternallyAccessible = number, true, true
		for _, c := range change {
			c(p)
		}
	}
}

func portNamed(name string) func(*service.Port) { return func(p *service.Port) { p.Port = name } }

func TestHealthPorts(t *testing.T) {
	dual := func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd00::1") }
	const remedy = ": load balancers can't learn whether this node has endpoints; give one of the two another port"
	at := func(f service.Family, port uint16, name string, endpoints int, problem ...string) HealthPort {
		h := HealthPort{Family: f, Port: port, Namespace: "ns", Name: name, Endpoints: endpoints}
		if len(problem) > 0 {
			h.Problem = problem[0] + remedy
		}
		return h
	}
	tests := []struct {
		name  string
		build func(*world)
		want  []HealthPort
	}{
		{"none asked for", func(w *world) { w.set(port("web"), "10.0.0.1 n1 ready") }, nil},
		{"ready endpoints on this node", func(w *world) {
			w.set(port("web", checked(32000)), "10.0.0.1 n1 ready", "10.0.0.2 n1 ready", "10.0.0.3 n2 ready", "10.0.0.4 n1", "10.0.0.5 n1 serving terminating", "10.0.0.6 n1 ready terminating")
		}, []HealthPort{at(service.IPv4, 32000, "web", 2)}},
		{"no endpoint: answered, with none", func(w *world) { w.set(port("web", checked(32000))) }, []HealthPort{at(service.IPv4, 32000, "web", 0)}},
		{"an address counts once, whatever ports it has", func(w *world) {
			w.set(port("web", checked(32000, portNamed("http"))), "10.0.0.1:80 n1 ready", "10.0.0.1:81 n1 ready")
			w.set(port("web", checked(32000, portNamed("https"))), "10.0.0.1:443 n1 ready", "10.0.0.2:443 n1 ready")
		}, []HealthPort{at(service.IPv4, 32000, "web", 2)}},
		{"each family for itself", func(w *world) {
			w.set(port("web", checked(32000, dual)), "10.0.0.1 n1 ready", "[fd01::1]:80 n1 ready", "[fd01::2]:80 n1 ready")
		}, []HealthPort{at(service.IPv4, 32000, "web", 1), at(service.IPv6, 32000, "web", 2)}},
		{"two Services", func(w *world) {
			w.set(port("a", checked(32001)), "10.0.0.1 n1 ready")
			w.set(port("b", checked(32000)), "10.0.0.1 n2 ready")
		}, []HealthPort{at(service.IPv4, 32000, "b", 0), at(service.IPv4, 32001, "a", 1)}},
		{"one port for two: the older Service has it", func(w *world) {
			w.set(port("a", checked(32000, func(p *service.Port) { p.Created = t0.Add(time.Hour) })))
			w.set(port("b", checked(32000)))
		}, []HealthPort{at(service.IPv4, 32000, "b", 0), at(service.IPv4, 32000, "a", 0, "its health check node port 32000 belongs to ns/b, which is older")}},
		{"of equally old ones the first", func(w *world) {
			w.set(port("a", checked(32000)))
			w.set(port("b", checked(32000)))
		}, []HealthPort{at(service.IPv4, 32000, "a", 0), at(service.IPv4, 32000, "b", 0, "its health check node port 32000 belongs to ns/a, which comes first by name")}},
		{"another's node port", func(w *world) {
			w.set(port("a", checked(32000)))
			w.set(port("b", func(p *service.Port) { p.NodePort = 32000 }))
		}, []HealthPort{at(service.IPv4, 32000, "a", 0, "its health check node port 32000 is the node port of ns/b")}},
		{"left to another proxy", func(w *world) {
			w.in.Policy.ExcludeCIDRs = prefixes("10.245.0.0/16")
			w.set(port("web", checked(32000)), "10.245.0.1 n1 ready")
		}, nil},
		{"partly: only what is outside counts", func(w *world) {
			w.in.Policy.ExcludeCIDRs = prefixes("10.245.0.0/16")
			w.set(port("web", checked(32000)), "10.245.0.1 n1 ready", "10.0.0.1 n1 ready")
		}, []HealthPort{at(service.IPv4, 32000, "web", 1)}},
		{"without endpoints", func(w *world) {
			w.set(port("web", checked(32000)))
		}, []HealthPort{at(service.IPv4, 32000, "web", 0)}},
		{"without endpoints it may be another proxy's", func(w *world) {
			w.in.Policy.ExcludeCIDRs = prefixes("10.245.0.0/16")
			w.set(port("web", checked(32000)))
		}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			tt.build(w)
			if diff := cmp.Diff(tt.want, HealthPorts(w.compute()), cmpopts.IgnoreUnexported(HealthPort{})); diff != "" {
				t.Errorf("health ports (-want +got):\n%s", diff)
			}
		})
	}
}
