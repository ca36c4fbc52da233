package agent

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// withModelIPVS gives a model host's programmer IPVS as well, with the table of virtual servers that it is to have.
func withModelIPVS(t *testing.T, m *modelHost, table ipvs.Table) {
	t.Helper()
	c := ipvs.Config{Sets: m.host.Sets(), Table: table, Link: m.host.Link(), DrainTimeout: time.Minute}
	l := ipvs.NewPlane(c, steering.DefaultOptions(), m.layer)
	m.stack(l)
}

// modelServers are the virtual servers of a model host.
func modelServers(m *modelHost) []ipvs.Server {
	servers, _ := m.host.Table().List() // a model's fails only by faults
	return servers
}

// bothPlanes is a plan of mode auto with a service in each data plane.
func bothPlanes(t *testing.T, host *kerneltest.Host, endpoints ...string) *plan.Plan {
	t.Helper()
	p := kerneltest.Plan(plan.ModeAuto,
		kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints(endpoints...), kerneltest.Kernel(plan.IPVS)),
		kerneltest.Service("b", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.2.0.2:8080")))
	// The fast loop makes the redirect sets before it hands over a plan.
	for _, s := range steering.EmptySetsOf(p) {
		if err := host.Sets().Create(s); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// TestProgrammerOfBothDataPlanes: services of IPVS and of iptables are programmed
// side by side, what is damaged is found and repaired, and the next kproxy takes
// both over without a change.
func TestProgrammerOfBothDataPlanes(t *testing.T) {
	m := newModelHost(t)
	withModelIPVS(t, m, m.host.Table())
	p := bothPlanes(t, m.host, "10.2.0.1:8080")
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	want := map[service.Key]uint64{}
	for _, s := range p.Services {
		want[s.Port.Key] = s.KernelHash
	}
	if diff := cmp.Diff(want, m.hashes()); diff != "" {
		t.Errorf("programmed (-want +got):\n%s", diff)
	}
	check := func(wantDamage bool) {
		t.Helper()
		found, err := m.plane.Check(t.Context())
		for deadline := time.Now().Add(time.Minute); wantDamage && err == nil && len(found) == 0 && time.Now().Before(deadline); { // it takes pauses
			time.Sleep(time.Millisecond)
			found, err = m.plane.Check(t.Context())
		}
		if err != nil || (len(found) > 0) != wantDamage {
			t.Errorf("the watch found %q, error %v; want damage: %v", found, err, wantDamage)
		}
	}
	check(false)
	if err := m.host.Table().Change(ipvs.Request{Do: ipvs.Delete, Virtual: modelServers(m)[0].Virtual})[0]; err != nil {
		t.Fatal(err)
	}
	check(true)
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	check(false)

	next := newModelHost(t)
	next.host = m.host
	next.stack(m.layer)
	if _, err := next.plane.Adopt(t.Context(), &service.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	next.adopt(p)
	if diff := cmp.Diff(want, next.hashes()); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
	applied := m.backend.applied
	if err := next.pass(t.Context(), p); err != nil || m.backend.applied != applied {
		t.Errorf("the first pass after a restart: error %v, %d applications; want nothing to do", err, m.backend.applied-applied)
	}
}

// TestProgrammerDrainsRealServers: one that isn't wanted any more stays until its
// connections have gone, and no longer.
func TestProgrammerDrainsRealServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newModelHost(t)
		withModelIPVS(t, m, m.host.Table())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.run(ctx, nil) }()
		reals := func(what string, want int) {
			t.Helper()
			time.Sleep(2 * drainEvery)
			synctest.Wait()
			if v := modelServers(m); len(v) != 1 || len(v[0].Reals) != want {
				t.Errorf("%s the virtual servers are %+v, want one with %d real servers", what, v, want)
			}
		}
		m.program(bothPlanes(t, m.host, "10.2.0.1:8080", "10.2.0.3:8080"))
		reals("with two endpoints", 2)
		for modelServers(m)[0].Connections[1] == 0 {
			m.host.Connect(rand.New(rand.NewPCG(1, 2)))
		}
		m.program(bothPlanes(t, m.host, "10.2.0.1:8080"))
		reals("while one that is gone has connections", 2)
		m.host.Disconnect(nil)
		reals("when it has none any more", 1)
		if cut := m.host.Cut(); len(cut) > 0 {
			t.Errorf("connections were cut off: %v", cut)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestSchedulersWanted: every algorithm that IPVS has, and the flag's first.
func TestSchedulersWanted(t *testing.T) {
	for given, want := range map[string][]string{
		"":    {"rr", "wrr", "wlc", "sh", "mh"},
		"sed": {"sed", "rr", "wrr", "wlc", "sh", "mh"},
		"wlc": {"wlc", "rr", "wrr", "sh", "mh"},
	} {
		if diff := cmp.Diff(want, ipvs.Schedulers(given)); diff != "" {
			t.Errorf("with --ipvs-scheduler %q (-want +got):\n%s", given, diff)
		}
	}
}
