package kernel_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

var comparable = cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })

func virtual(address, scheduler string, reals ...kernel.Real) kernel.Virtual {
	return kernel.Virtual{Protocol: service.TCP, Address: netip.MustParseAddrPort(address), Scheduler: scheduler, Reals: reals}
}

func real(address string, weight uint32) kernel.Real {
	return kernel.Real{Address: netip.MustParseAddrPort(address), Weight: weight}
}

func TestDiffOfVirtualServers(t *testing.T) {
	a, b := real("10.2.0.1:80", 1), real("10.2.0.2:80", 1)
	web := virtual("10.96.0.1:80", "rr")
	for name, tc := range map[string]struct {
		have, want []kernel.Virtual
		ops        []kernel.VirtualChange
	}{
		"nothing to do": {
			have: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a, b)},
			want: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a, b)},
		},
		"a new virtual server": {
			want: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a)},
			ops:  []kernel.VirtualChange{{Virtual: web, Settings: true, Set: []kernel.Real{a}}},
		},
		"one endpoint comes, one goes": {
			have: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a)},
			want: []kernel.Virtual{virtual("10.96.0.1:80", "rr", b)},
			ops:  []kernel.VirtualChange{{Virtual: web, Set: []kernel.Real{b}, Drain: []kernel.Real{a}}},
		},
		"another weight": {
			have: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a, b)},
			want: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a, real("10.2.0.2:80", 0))},
			ops:  []kernel.VirtualChange{{Virtual: web, Set: []kernel.Real{real("10.2.0.2:80", 0)}}},
		},
		"another scheduler": {
			have: []kernel.Virtual{virtual("10.96.0.1:80", "wlc", a)},
			want: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a)},
			ops:  []kernel.VirtualChange{{Virtual: web, Settings: true}},
		},
		"a service is gone": {
			have: []kernel.Virtual{virtual("10.96.0.1:80", "rr", a, b)},
			ops:  []kernel.VirtualChange{{Virtual: web, Drain: []kernel.Real{a, b}, Remove: true}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := kernel.Diff(kernel.Ruleset{Virtuals: tc.have}, kernel.Ruleset{Virtuals: tc.want}).Virtuals
			if diff := cmp.Diff(tc.ops, got, comparable); diff != "" {
				t.Errorf("operations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDiffOfAddresses(t *testing.T) {
	one, two, three := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.2"), netip.MustParseAddr("fd00::1")
	ops := kernel.Diff(kernel.Ruleset{Addresses: []netip.Addr{one, two}}, kernel.Ruleset{Addresses: []netip.Addr{two, three}})
	if len(ops.AddAddresses) != 1 || ops.AddAddresses[0] != three || len(ops.DelAddresses) != 1 || ops.DelAddresses[0] != one {
		t.Errorf("add %v, delete %v; want %v and %v", ops.AddAddresses, ops.DelAddresses, three, one)
	}
}

func TestVirtualServerOfAnAddress(t *testing.T) {
	r := kernel.Ruleset{Virtuals: []kernel.Virtual{virtual("10.96.0.1:80", "rr"), virtual("10.96.0.1:443", "wlc")}}
	v, ok := r.Virtual(service.TCP, netip.MustParseAddrPort("10.96.0.1:443"))
	if !ok || v.Scheduler != "wlc" {
		t.Errorf("got %v, %v; want the one with wlc", v, ok)
	}
	if _, ok := r.Virtual(service.UDP, netip.MustParseAddrPort("10.96.0.1:443")); ok {
		t.Error("found one of another protocol")
	}
}
