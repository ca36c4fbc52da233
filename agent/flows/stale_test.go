package flows

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// oneService is a plan with a service that userspace or the kernel carries, whose
// only endpoint is at an address.
func oneService(p service.Protocol, d plan.DataPlane, endpoint string) *plan.Plan {
	return &plan.Plan{Services: []*plan.Service{{
		Port: &service.Port{Key: service.Key{Namespace: "shop", Name: "web", Protocol: p}}, DataPlane: d,
		Endpoints: []plan.Endpoint{{Endpoint: &service.Endpoint{Address: netip.MustParseAddrPort(endpoint), Ready: true, Serving: true}, Usable: true}},
	}}}
}

// changes leads from one plan to another that was computed from it.
func changes(old, p *plan.Plan) plan.Delta {
	d := plan.Between(old, p)
	d.Full = false
	return d
}

// TestStaleCleanup: what is looked for follows from what happened; what happens before
// a clean-up is one clean-up; one that failed is done again.
func TestStaleCleanup(t *testing.T) {
	const one, other = "10.2.0.2:80", "10.2.0.3:80"
	tcp, moved := oneService(service.TCP, plan.IPTables, one), oneService(service.TCP, plan.Userspace, one)
	pointed := oneService(service.TCP, plan.Userspace, other)
	gone := []netip.AddrPort{netip.MustParseAddrPort(one)}
	dns, pointedDNS := oneService(service.UDP, plan.IPTables, one), oneService(service.UDP, plan.Userspace, other)
	for _, tt := range []struct {
		name string
		now  *plan.Plan
		do   func(*StaleCleanup)
		want pending
	}{
		{"nothing", tcp, func(s *StaleCleanup) { s.Follow(tcp, changes(tcp, tcp)) }, pending{}},
		{"the first plan", tcp, func(s *StaleCleanup) { s.Follow(nil, plan.Between(nil, tcp)) }, pending{stale: true, former: []*plan.Plan{nil}}},
		{"a TCP service moved", moved, func(s *StaleCleanup) { s.Follow(tcp, changes(tcp, moved)) }, pending{}},
		{"its endpoint is gone", pointed, func(s *StaleCleanup) { s.Follow(tcp, changes(tcp, pointed)) }, pending{unused: gone}},
		{"its rules were written over the former plan's", pointed, func(s *StaleCleanup) { s.Written(tcp, changes(tcp, pointed)) }, pending{unused: gone}},
		{"many of its endpoints are gone, one after the other", pointed, func(s *StaleCleanup) {
			for i := range maxUnused + 1 {
				s.Follow(nil, changes(oneService(service.TCP, plan.NFTables, fmt.Sprintf("10.2.1.%d:80", i)), pointed))
			}
		}, pending{halfOpen: true}},
		{"it goes and comes, and goes", pointed, func(s *StaleCleanup) {
			for range 2 * maxUnused {
				s.Follow(tcp, changes(tcp, pointed))
			}
		}, pending{unused: gone}},
		{"its rules were written", pointed, func(s *StaleCleanup) { s.Written(tcp, plan.Delta{Full: true}) }, pending{stale: true, former: []*plan.Plan{tcp}, halfOpen: true}},
		{"a UDP endpoint is gone", pointedDNS, func(s *StaleCleanup) { s.Follow(dns, changes(dns, pointedDNS)) }, pending{stale: true, former: []*plan.Plan{dns}}},
		{"rules of no endpoint that is gone were written", moved, func(s *StaleCleanup) { s.Written(tcp, changes(tcp, moved)) }, pending{}},
		{"UDP rules were written over the former plan's", pointedDNS, func(s *StaleCleanup) { s.Written(dns, changes(dns, pointedDNS)) }, pending{stale: true, former: []*plan.Plan{dns}}},
		{"UDP rules were written", pointedDNS, func(s *StaleCleanup) { s.Written(dns, plan.Delta{Full: true}) }, pending{stale: true, former: []*plan.Plan{dns}, halfOpen: true}},
		{"rules were written over unknown ones", tcp, func(s *StaleCleanup) { s.Written(nil, changes(nil, tcp)) }, pending{stale: true, former: []*plan.Plan{nil}, halfOpen: true}},
		{"redirecting had stopped", tcp, (*StaleCleanup).All, pending{stale: true, former: []*plan.Plan{nil}, halfOpen: true}},
		{"two things", pointedDNS, func(s *StaleCleanup) { s.Follow(tcp, changes(tcp, pointed)); s.Follow(dns, changes(dns, pointedDNS)) }, pending{stale: true, former: []*plan.Plan{dns}, unused: gone}},
		{"an endpoint is gone, and redirecting had stopped", pointed, func(s *StaleCleanup) { s.Follow(tcp, changes(tcp, pointed)); s.All() }, pending{stale: true, former: []*plan.Plan{nil}, halfOpen: true}},
	} {
		var got pending
		failing := true
		s := &StaleCleanup{
			Config: Config{Log: slog.New(slog.DiscardHandler), Plan: func() *plan.Plan { return tt.now }, Cleaned: func(time.Duration) {}}, wake: make(chan struct{}, 1),
			sweep: func(w pending, _ *plan.Plan) error {
				if failing {
					return errors.New("no buffer space")
				}
				got = w
				return nil
			},
		}
		tt.do(s)
		if err := s.clean(); (err != nil) == tt.want.empty() || (s.Report() != nil) == tt.want.empty() {
			t.Errorf("%s: error %v, reported %v; want one only if entries are looked for", tt.name, err, s.Report())
		}
		if failing = false; s.clean() != nil || s.Report() != nil {
			t.Errorf("%s: a second attempt fails: %v", tt.name, s.Report())
		}
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(pending{}), cmpopts.EquateComparable(netip.AddrPort{}), cmp.Comparer(func(a, b *plan.Plan) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
		if got = (pending{}); s.clean() != nil || !got.empty() {
			t.Errorf("%s: cleaned up a third time: %+v", tt.name, got)
		}
	}
}

// What a plan requests is looked for by that plan, though it comes in force while a
// clean-up begins.
func TestSweepByThePlanThatOwes(t *testing.T) {
	first, second := new(plan.Plan), new(plan.Plan)
	current, comes := first, true
	var by []*plan.Plan
	s := &StaleCleanup{wake: make(chan struct{}, 1), Config: Config{Log: slog.New(slog.DiscardHandler), Cleaned: func(time.Duration) {}}}
	s.Plan = func() *plan.Plan {
		p := current
		if comes { // the fast loop is quicker
			comes = false
			current = second
			s.request(pending{stale: true, former: []*plan.Plan{first}})
		}
		return p
	}
	s.sweep = func(_ pending, p *plan.Plan) error { by = append(by, p); return nil }
	for s.All(); len(s.wake) > 0; {
		<-s.wake
		if err := s.clean(); err != nil {
			t.Fatal(err)
		}
	}
	if want := []*plan.Plan{first, second}; !slices.Equal(want, by) {
		t.Errorf("cleaned up by %v, want %v", by, want)
	}
}

// While sweeps fail, not every plan there ever was is kept.
func TestSweepsThatFailKeepFewPlans(t *testing.T) {
	s := &StaleCleanup{wake: make(chan struct{}, 1), Config: Config{Log: slog.New(slog.DiscardHandler), Cleaned: func(time.Duration) {}}}
	s.Plan = func() *plan.Plan { return &plan.Plan{} }
	s.sweep = func(pending, *plan.Plan) error { return errors.New("no") }
	for range 10 * maxFormer {
		s.Written(&plan.Plan{}, plan.Delta{Full: true})
		s.clean()
	}
	if n := len(s.pending.former); n != maxFormer {
		t.Errorf("%d plans are kept, want %d", n, maxFormer)
	}
}

// Changes that follow each other have one search for half-open connections, before a client sends its SYN again. UDP clients
// don't wait for it.
func TestHalfOpenSearchesAreOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var udp, tcp atomic.Int32
		s := &StaleCleanup{
			wake: make(chan struct{}, 1), Config: Config{Log: slog.New(slog.DiscardHandler), Cleaned: func(time.Duration) {}, Plan: func() *plan.Plan { return &plan.Plan{} }},
			sweep: func(w pending, _ *plan.Plan) error {
				if w.stale {
					udp.Add(1)
				} else {
					tcp.Add(1)
				}
				return nil
			},
		}
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		for range 10 {
			s.request(pending{halfOpen: true})
			time.Sleep(halfOpenDelay / 20)
		}
		synctest.Wait()
		if n := tcp.Load(); n != 0 {
			t.Errorf("%d searches while changes follow each other, want none", n)
		}
		time.Sleep(halfOpenDelay)
		synctest.Wait()
		if n := tcp.Load(); n != 1 {
			t.Errorf("%d searches after ten changes, want 1", n)
		}
		s.request(pending{stale: true})
		synctest.Wait()
		if n := udp.Load(); n != 1 {
			t.Errorf("%d searches for UDP flows at once, want 1", n)
		}
		cancel()
		running.Wait()
	})
}
