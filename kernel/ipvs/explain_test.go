package ipvs

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// countedWith is a virtual server with real servers of weights and active connections.
func countedWith(scheduler string, persistence uint32, reals ...[2]int) *counted {
	v := &counted{Virtual: kernel.Virtual{Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.99:80"), Scheduler: scheduler, Persistence: persistence}}
	for i, r := range reals {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(2 + i)}), 9000)
		v.reals = append(v.reals, countedReal{Real: kernel.Real{Address: a, Weight: uint32(r[0])}, active: r[1]})
	}
	return v
}

func TestBalancer(t *testing.T) {
	client, second := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.2.0.3:9000")
	for _, tt := range []struct {
		name    string
		v       *counted
		clients []kernel.Client
		want    [2]float64
	}{
		{"rr", countedWith("rr", 0, [2]int{1, 0}, [2]int{3, 0}), nil, [2]float64{0.5, 0.5}},
		{"wrr", countedWith("wrr", 0, [2]int{1, 0}, [2]int{3, 0}), nil, [2]float64{0.25, 0.75}},
		{"weight 0", countedWith("rr", 0, [2]int{0, 0}, [2]int{1, 0}), nil, [2]float64{0, 1}},
		{"lc", countedWith("lc", 0, [2]int{9, 2}, [2]int{1, 1}), nil, [2]float64{0, 1}},
		{"wlc", countedWith("wlc", 0, [2]int{9, 2}, [2]int{1, 1}), nil, [2]float64{1, 0}},
		{"wlc, all idle", countedWith("wlc", 0, [2]int{1, 0}, [2]int{1, 0}), nil, [2]float64{1, 0}},
		{"sed", countedWith("sed", 0, [2]int{1, 0}, [2]int{3, 1}), nil, [2]float64{0, 1}},
		{"nq", countedWith("nq", 0, [2]int{9, 1}, [2]int{1, 0}), nil, [2]float64{0, 1}},
		{"sh", countedWith("sh", 0, [2]int{1, 0}, [2]int{1, 0}), nil, [2]float64{0.5, 0.5}},
		{"a client that stays", countedWith("rr", 600, [2]int{1, 0}, [2]int{1, 0}), []kernel.Client{{Address: client, Endpoint: second}}, [2]float64{0, 1}},
		{"a client whose endpoint drains", countedWith("rr", 600, [2]int{1, 0}, [2]int{0, 0}), []kernel.Client{{Address: client, Endpoint: second}}, [2]float64{1, 0}},
		{"a client whose endpoint is gone", countedWith("rr", 600, [2]int{1, 0}, [2]int{1, 0}), []kernel.Client{{Address: client, Endpoint: netip.MustParseAddrPort("10.2.0.9:9000")}}, [2]float64{0.5, 0.5}},
		{"another client that stays", countedWith("rr", 600, [2]int{1, 0}, [2]int{1, 0}), []kernel.Client{{Address: netip.MustParseAddr("10.1.0.7"), Endpoint: second}}, [2]float64{0.5, 0.5}},
		{"no real server takes connections", countedWith("rr", 0, [2]int{0, 0}, [2]int{0, 0}), nil, [2]float64{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := tt.v.balancer(tt.clients, client)
			if got := [2]float64{b.Targets[0].Share, b.Targets[1].Share}; got != tt.want {
				t.Errorf("shares %v, want %v", got, tt.want)
			}
			if b.Plane == "" || b.Name == "" || b.Text == "" {
				t.Errorf("%+v doesn't say what it is", b)
			}
		})
	}
}

// TestCompare: scheduler, persistence, real servers and their weights.
func TestCompare(t *testing.T) {
	planned := kernel.Virtual{Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.99:80"), Scheduler: "rr"}
	for i, w := range []uint32{1, 2} {
		planned.Reals = append(planned.Reals, kernel.Real{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(2 + i)}), 9000), Weight: w})
	}
	same := [][2]int{{1, 0}, {2, 0}}
	for _, tt := range []struct {
		name  string
		found *counted
		want  []string
	}{
		{"as planned", countedWith("rr", 0, same...), nil},
		{"none", nil, []string{"virtual server tcp 10.96.0.99:80: there, missing"}},
		{"another scheduler", countedWith("lc", 0, same...), []string{"scheduler of virtual server tcp 10.96.0.99:80: rr, lc"}},
		{"persistent", countedWith("rr", 60, same...), []string{"persistence of virtual server tcp 10.96.0.99:80: 0 s, 60 s"}},
		{"another weight", countedWith("rr", 0, [2]int{1, 0}, [2]int{1, 0}), []string{"real server 10.2.0.3:9000 of virtual server tcp 10.96.0.99:80: weight 2, weight 1"}},
		{"one less", countedWith("rr", 0, [2]int{1, 0}), []string{"real server 10.2.0.3:9000 of virtual server tcp 10.96.0.99:80: weight 2, missing"}},
		{"one too many", countedWith("rr", 0, [2]int{1, 0}, [2]int{2, 0}, [2]int{1, 0}), []string{"real server 10.2.0.4:9000 of virtual server tcp 10.96.0.99:80: not there, weight 1"}},
		{"one that drains", countedWith("rr", 0, [2]int{1, 0}, [2]int{2, 0}, [2]int{0, 0}), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, m := range compare(&planned, tt.found) {
				got = append(got, m.Object+": "+m.Planned+", "+m.Kernel)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
