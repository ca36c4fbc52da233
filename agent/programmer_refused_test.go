package agent

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// refusingTable refuses a service's virtual servers.
type refusingTable struct {
	ipvs.Table
	refuses atomic.Pointer[service.Key]
}

func (t *refusingTable) refuse(k service.Key) { t.refuses.Store(&k) }

func (t *refusingTable) Change(requests ...ipvs.Request) []error {
	errs := make([]error, 0, len(requests))
	for _, r := range requests {
		if k := t.refuses.Load(); k != nil && r.Virtual.Owner == *k {
			errs = append(errs, unix.ENOMEM)
			continue
		}
		errs = append(errs, t.Table.Change(r)...)
	}
	return errs
}

// sparing is a plane that tries again what was refused only where nothing else is wanted, which is all that a plane
// has to do.
type sparing struct {
	kernel.Plane
	refuses atomic.Pointer[service.Key]
	refused service.Key
	changed bool
}

func (s *sparing) refuse(k service.Key) { s.refuses.Store(&k) }

func (s *sparing) Want(p *plan.Plan, d plan.Delta) bool {
	s.changed = s.changed || len(d.Changes) > 0
	return s.Plane.Want(p, d) || s.changed
}

func (s *sparing) Sync(ctx context.Context, steered func()) kernel.Result {
	if k := s.refuses.Load(); k != nil && (s.refused == service.Key{} || !s.changed) {
		s.refused = *k
	}
	s.changed = false
	r := s.Plane.Sync(ctx, steered)
	if s.refused != (service.Key{}) {
		r.Tried, r.Failed = true, map[service.Key]error{s.refused: unix.ENOMEM}
	}
	return r
}

func (s *sparing) Programmed() map[service.Key]uint64 {
	out := s.Plane.Programmed()
	delete(out, s.refused)
	return out
}

// TestRefusedServiceIsAskedForAgain: what the kernel refuses for a while is programmed within the longest pause between
// retries after that, also while other services change all the time.
func TestRefusedServiceIsAskedForAgain(t *testing.T) {
	for name, with := range map[string]func(*modelHost) (refuse func(service.Key), kernel plan.DataPlane){
		"iptables": func(m *modelHost) (func(service.Key), plan.DataPlane) { return m.backend.refuse, plan.IPTables },
		"ipvs": func(m *modelHost) (func(service.Key), plan.DataPlane) {
			table := &refusingTable{Table: m.host.Table()}
			withModelIPVS(t, m, table)
			return table.refuse, plan.IPVS
		},
		"a plane that spares itself retries": func(m *modelHost) (func(service.Key), plan.DataPlane) {
			s := &sparing{Plane: m.plane}
			m.plane = s
			return s.refuse, plan.IPTables
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newModelHost(t)
				refuse, plane := with(m)
				plans := func(n int) *plan.Plan {
					p := kerneltest.Plan(plan.ModeAuto,
						kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.2.0.1:8080"), kerneltest.Kernel(plane)),
						kerneltest.Service("b", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints(fmt.Sprintf("10.2.1.%d:8080", n%200+1)), kerneltest.Kernel(plane)))
					for _, s := range steering.EmptySetsOf(p) {
						if err := m.host.Sets().Create(s); err != nil {
							t.Fatal(err)
						}
					}
					return p
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- m.run(ctx, nil) }()
				n := 0
				change := func(d time.Duration) {
					for end := time.Now().Add(d); time.Now().Before(end); n++ {
						m.program(plans(n))
						time.Sleep(100 * time.Millisecond)
						synctest.Wait()
					}
				}
				a := plans(0).Services[0].Port.Key
				refuse(a)
				change(time.Minute)
				if h := m.hashes(); h[a] != 0 || m.report().failed[a].Reason == "" {
					t.Fatalf("the refused service counts as programmed: %x, failed: %+v", h[a], m.report().failed[a])
				}
				refuse(service.Key{})
				change(retryMax + time.Second)
				if m.hashes()[a] == 0 {
					t.Error("the service isn't programmed although the kernel refuses it no more")
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
