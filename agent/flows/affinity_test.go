package flows

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

var web = service.Key{Namespace: "shop", Name: "web", Port: "http", Protocol: service.TCP}

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

// TestAffinityJob: it has what moves to the kernel and from there, by the plan in which the
// kernel has the service.
func TestAffinityJob(t *testing.T) {
	old, p := &plan.Plan{}, &plan.Plan{}
	for _, x := range []struct {
		was, is plan.DataPlane
		in, out bool
	}{
		{was: plan.Userspace, is: plan.IPVS, in: true},
		{was: plan.IPVS, is: plan.Userspace, out: true},
		{was: plan.Userspace, is: plan.IPTables, in: true},
		{was: plan.IPTables, is: plan.Userspace, out: true},
		{was: plan.IPVS, is: plan.None},
		{was: plan.IPVS, is: plan.IPTables},
		{was: plan.Userspace, is: plan.Userspace},
	} {
		was, is := affine(x.was), affine(x.is)
		j := affinityJobOf(old, p, plan.Delta{Changes: []plan.Change{{Was: was, Is: is}}})
		var want affinityJob
		if x.in {
			want.in = []kernel.Moving{{Service: is, Policy: &p.Policy}}
		}
		if x.out {
			want.out = []kernel.Moving{{Service: was, Policy: &old.Policy}}
		}
		if !slices.Equal(j.in, want.in) || !slices.Equal(j.out, want.out) || len(j.is) != len(j.in)+len(j.out) {
			t.Errorf("%s to %s: in %v, out %v; want %v and %v", x.was, x.is, j.in, j.out, want.in, want.out)
		}
	}
}

// TestRemember: of what IPVS knows of a client, the latest counts, but not more
// than what userspace has learned since the move began.
func TestRemember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := netip.MustParseAddr
		two, three, gone := netip.MustParseAddrPort("10.2.0.2:8080"), netip.MustParseAddrPort("10.2.0.3:8080"), netip.MustParseAddrPort("10.2.0.9:8080")
		table := lb.NewAffinity(time.Hour)
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
		m := &Affinity{log: slog.New(slog.DiscardHandler), jobs: make(chan affinityJob)}
		begun := time.Now()
		m.Move(nil, nil, plan.Delta{}) // nothing moves
		old, p := &plan.Plan{}, &plan.Plan{}
		d := plan.Delta{Changes: []plan.Change{{Was: affine(plan.IPVS), Is: affine(plan.Userspace)}}}
		go func() { <-m.jobs }() // taken, and never done
		m.Move(old, p, d)
		m.Move(old, p, d) // not even taken
		if took := time.Since(begun); took != 2*affinityPatience {
			t.Errorf("it took %s, want twice %s", took, affinityPatience)
		}
	})
}
