package agent

import (
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// affine is a service with an hour's affinity and two endpoints, in a data plane.
func affine(plane plan.DataPlane) *plan.Service {
	s := &plan.Service{Port: &service.Port{Key: web, Number: 80, Affinity: time.Hour}, DataPlane: plane, Scheduler: "rr"}
	s.Frontends = []plan.Frontend{
		{Kind: plan.ClusterIP, Protocol: service.TCP, Verdict: plan.Forward, Address: netip.MustParseAddrPort("10.96.0.10:80")},
		{Kind: plan.NodePort, Protocol: service.TCP, Verdict: plan.Forward, Address: netip.AddrPortFrom(netip.Addr{}, 30080)},
	}
	for _, a := range []string{"10.2.0.2:8080", "10.2.0.3:8080"} {
		e := service.Endpoint{Address: netip.MustParseAddrPort(a), Weight: 1}
		s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &e, Usable: true})
		s.Groups[service.IPv4].Cluster = append(s.Groups[service.IPv4].Cluster, plan.Backend{Address: e.Address, Weight: 1})
	}
	return s
}

// TestAffinityJob: it has the virtual servers of every address of what moves,
// by the plan in which IPVS has the service.
func TestAffinityJob(t *testing.T) {
	planAt := func(node string) *plan.Plan {
		return &plan.Plan{Policy: plan.Policy{NodeAddresses: []netip.Addr{netip.MustParseAddr(node)}}}
	}
	old, p := planAt("192.0.2.1"), planAt("192.0.2.2")
	for _, x := range []struct {
		was, is plan.DataPlane
		in, out []string
	}{
		{plan.Userspace, plan.IPVS, []string{"10.96.0.10:80", "192.0.2.2:30080"}, nil},
		{plan.IPVS, plan.Userspace, nil, []string{"10.96.0.10:80", "192.0.2.1:30080"}},
		{plan.Userspace, plan.IPTables, nil, nil},
		{plan.IPTables, plan.Userspace, nil, nil},
		{plan.IPVS, plan.None, nil, nil},
	} {
		var j affinityJob
		moved := j.add(old, p, affine(x.was), affine(x.is))
		if want := len(x.in)+len(x.out) > 0; moved != want {
			t.Errorf("%s to %s: %t, want %t", x.was, x.is, moved, want)
		}
		for what, v := range map[string][2]any{"in": {x.in, places(j.in)}, "out": {x.out, places(j.out)}} {
			if diff := cmp.Diff(v[0], v[1]); diff != "" {
				t.Errorf("%s to %s, %s (-want +got):\n%s", x.was, x.is, what, diff)
			}
		}
	}
}

func places(virtuals []kernel.Virtual) (out []string) {
	for _, v := range virtuals {
		out = append(out, v.Address.String())
	}
	return out
}

// TestRemember: of what IPVS knows of a client, the latest counts, but not more
// than what userspace has learned since the move began.
func TestRemember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := netip.MustParseAddr
		two, three, gone := netip.MustParseAddrPort("10.2.0.2:8080"), netip.MustParseAddrPort("10.2.0.3:8080"), netip.MustParseAddrPort("10.2.0.9:8080")
		table := lb.NewAffinity(lb.AffinityConfig{Timeout: time.Hour})
		table.Set(a("10.1.0.2"), two, time.Now()) // from before the service was in IPVS
		time.Sleep(10 * time.Minute)
		begun := time.Now()
		time.Sleep(time.Second)
		table.Set(a("10.1.0.3"), two, time.Now())
		remember(table, affine(plan.Userspace), []kernel.Client{
			{Address: a("10.1.0.2"), Endpoint: three, Remaining: 50 * time.Minute},
			{Address: a("10.1.0.3"), Endpoint: three, Remaining: 59 * time.Minute},
			{Address: a("10.1.0.4"), Endpoint: three, Remaining: 20 * time.Minute},
			{Address: a("10.1.0.4"), Endpoint: two, Remaining: 10 * time.Minute},
			{Address: a("10.1.0.5"), Endpoint: gone, Remaining: time.Minute},
		}, begun)
		got := map[string]string{}
		for c := range table.All(time.Now()) {
			got[c.Client.String()] = c.Endpoint.String() + " for " + c.Remaining.String()
		}
		want := map[string]string{
			"10.1.0.2": three.String() + " for 50m0s", "10.1.0.3": two.String() + " for 1h0m0s", "10.1.0.4": three.String() + " for 20m0s",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("userspace's clients (-want +got):\n%s", diff)
		}
	})
}

// TestAffinityDoesntHoldUp: a pass goes on when clients take long to be taken
// along, and another one doesn't wait behind that.
func TestAffinityDoesntHoldUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newIPVSAffinity(slog.New(slog.DiscardHandler), kernel.DefaultMarks(), nil)
		var j affinityJob
		begun := time.Now()
		m.move(j) // nothing moves
		j.add(&plan.Plan{}, &plan.Plan{}, affine(plan.IPVS), affine(plan.Userspace))
		go func() { <-m.jobs }() // taken, and never done
		m.move(j)
		m.move(j) // not even taken
		if took := time.Since(begun); took != 2*affinityPatience {
			t.Errorf("it took %s, want twice %s", took, affinityPatience)
		}
	})
}
