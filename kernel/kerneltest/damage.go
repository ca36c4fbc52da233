package kerneltest

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// damages are what other programs do to kproxy's objects.
var damages = []struct {
	name string
	do   func(h *Host)
	// forgotten: only a backend that knows what there was can put it right.
	forgotten bool
}{
	{"delete the virtual servers", func(h *Host) {
		maps.DeleteFunc(h.virtuals, func(_ server, m *modelVirtual) bool { return !m.foreign })
	}, false},
	{"delete a virtual server", func(h *Host) { delete(h.virtuals, h.own()[0]) }, false},
	{"delete real servers", func(h *Host) {
		for _, k := range h.own() {
			clear(h.virtuals[k].reals)
		}
	}, false},
	{"change weights", func(h *Host) {
		for _, k := range h.own() {
			for _, r := range h.virtuals[k].reals {
				r.weight += 5
			}
		}
	}, true}, // what drains has weight 0
	{"change settings", func(h *Host) {
		for _, k := range h.own() {
			h.virtuals[k].Scheduler, h.virtuals[k].Persistence = "lblc", 77
		}
	}, false},
	{"delete the link", func(h *Host) { delete(h.links, kernel.DummyLink) }, false},
	{"set the link down", func(h *Host) { h.links[kernel.DummyLink].up = false }, false},
	{"delete addresses", func(h *Host) { clear(h.links[kernel.DummyLink].addresses) }, false},
	{"empty the record of virtual servers", emptySets(kernel.SetVirtual), true},
	{"empty the record of addresses", emptySets(kernel.SetVIP), false},
	{"empty the record of drains", emptySets(kernel.SetDrain), true},
	{"empty the record of endpoints", emptySets(kernel.SetEndpoint), false},
	{"empty the sets of masquerading", emptySets(kernel.SetMasqAll, kernel.SetMasqNet, kernel.SetMasqNode), false},
	{"flush the rules", func(h *Host) {
		for f := range h.chains {
			for i := range h.chains[f] {
				h.chains[f][i].Rules = nil
			}
			h.jumps[f] = nil
		}
	}, false},
}

// emptySets flushes sets of both families.
func emptySets(bases ...string) func(*Host) {
	return func(h *Host) {
		for _, base := range bases {
			for _, f := range service.Families {
				if s := h.sets[kernel.FamilySet(base, f)]; s != nil {
					clear(s.entries)
				}
			}
		}
	}
}

// own are kproxy's virtual servers.
func (h *Host) own() []server {
	return slices.DeleteFunc(h.servers(), func(k server) bool { return h.virtuals[k].foreign })
}

// damage has other programs change kproxy's objects. The backend reads them again, as the agent
// has it do, and repairs all of them.
func (m Mode) damage(t *testing.T) {
	if s := m.Open(t, &Faults{}); s.Host == nil || s.Drain == nil {
		return
	}
	web := func(endpoints ...string) *plan.Service {
		return Service("web", service.TCP, Kernel(m.Plane), Cluster("10.96.7.1:80"), Cluster("[fd00:96:7::1]:80"),
			External("192.0.2.77:80"), NodePort(30080), Endpoints(endpoints...))
	}
	before := m.plan(web("10.244.7.1:8080", "10.244.7.2:8080", "[fd00:244:7::1]:8080", "[fd00:244:7::2]:8080"))
	after := m.plan(web("10.244.7.1:8080", "[fd00:244:7::1]:8080"))
	damaged := func(t *testing.T, do func(*Host)) System {
		s := m.Open(t, &Faults{})
		m.bring(t, s, before)
		for range 5 {
			s.Host.Connect(rand.New(rand.NewPCG(3, 3)))
		}
		m.bring(t, s, after) // something drains
		s.Host.damage(do)
		return s
	}
	finish := func(t *testing.T, s System, want kernel.Ruleset) {
		m.bring(t, s, want)
		m.goOn(t, s)
		m.uncut(t, s)
		s.settle(t)
		m.same(t, s, want)
	}
	for _, v := range damages {
		t.Run(v.name, func(t *testing.T) {
			finish(t, damaged(t, v.do), after)
		})
		t.Run(v.name+", and kproxy doesn't look", func(t *testing.T) {
			s := damaged(t, v.do)
			for _, way := range []kernel.Ops{kernel.Diff(after, before), kernel.Diff(before, after)} {
				applied, err := s.Backend.Apply(context.Background(), way)
				if err != nil {
					t.Errorf("Apply: %v", err) // single services may fail, and the agent looks then
				}
				s.Host.hold(t, way, applied)
			}
			finish(t, s, after)
		})
		if v.forgotten {
			continue
		}
		t.Run(v.name+", and kproxy starts again", func(t *testing.T) {
			finish(t, damaged(t, v.do).restarted(t), after)
		})
	}
}

// hold checks that the real servers which were to be made, or to have another
// weight, are there, unless their service failed.
func (h *Host) hold(t *testing.T, ops kernel.Ops, a kernel.Applied) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range ops.Virtuals {
		if _, failed := a.Failed[c.Owner]; failed || c.Remove {
			continue
		}
		m := h.virtuals[server{c.Protocol, c.Address}]
		for _, r := range c.Set {
			if m == nil || m.reals[r.Address] == nil || m.reals[r.Address].weight != r.Weight {
				t.Errorf("%s %s lacks real server %s of weight %d", c.Protocol, c.Address, r.Address, r.Weight)
			}
		}
	}
}

func (h *Host) damage(do func(*Host)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	do(h)
}
