package flows

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// TestConntrackRepair: entries are put back of what userspace carries, and of nothing
// else; an error with one is no reason to leave the others.
func TestConntrackRepair(t *testing.T) {
	at := netip.MustParseAddrPort
	established := conntrack.Flow{
		Protocol: service.TCP, TCPState: 3,
		OrigSrc: at("10.1.0.2:5000"), OrigDst: at("10.96.0.10:80"), ReplySrc: at("10.3.0.1:40000"), ReplyDst: at("10.1.0.2:5000"),
	}
	with := func(f conntrack.Flow, change func(*conntrack.Flow)) conntrack.Flow {
		change(&f)
		return f
	}
	port := func(f *conntrack.Flow, p uint16) {
		f.OrigSrc = netip.AddrPortFrom(f.OrigSrc.Addr(), p)
		f.ReplyDst = f.OrigSrc
	}
	halfClosed := with(established, func(f *conntrack.Flow) { port(f, 5001); f.TCPState = 5 })
	otherPort := with(established, func(f *conntrack.Flow) { port(f, 5002); f.OrigSrc = at("10.1.0.2:5003") })
	failing := with(established, func(f *conntrack.Flow) { port(f, 5004) })
	datagrams := conntrack.Flow{
		Protocol: service.UDP, Timeout: time.Second,
		OrigSrc: at("10.1.0.2:5005"), OrigDst: at("10.96.0.10:53"), ReplySrc: at("10.3.0.1:40001"), ReplyDst: at("10.1.0.2:5006"),
	}
	carried := []userspace.Connection{}
	for _, f := range []conntrack.Flow{established, halfClosed, otherPort, failing} {
		carried = append(carried, userspace.Connection{Protocol: service.TCP, Client: f.ReplyDst, Address: f.OrigDst})
	}
	carried = append(carried, userspace.Connection{Protocol: service.UDP, Client: datagrams.OrigSrc, Address: datagrams.OrigDst})
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var restored []conntrack.Flow
		r := Repair{
			log: slog.New(slog.DiscardHandler), wake: make(chan struct{}, 1),
			ports:       func() (tcp, udp uint16) { return 40000, 40001 },
			connections: func() []userspace.Connection { return carried },
			restore: func(f conntrack.Flow) error {
				if f == failing {
					return errors.New("no")
				}
				mu.Lock()
				defer mu.Unlock()
				restored = append(restored, f)
				return nil
			},
		}
		expect := func(want ...conntrack.Flow) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if diff := cmp.Diff(want, restored, cmp.Comparer(func(a, b conntrack.Flow) bool { return a == b })); diff != "" {
				t.Errorf("restored (-want +got):\n%s", diff)
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		for _, f := range []conntrack.Flow{
			failing, established,
			with(established, func(f *conntrack.Flow) { f.TCPState = 7 }), // closed in good order
			with(established, func(f *conntrack.Flow) { port(f, 6000) }),  // not carried
			with(established, func(f *conntrack.Flow) { f.ReplySrc = at("10.2.0.2:80") }),
			with(established, func(f *conntrack.Flow) { f.Zone = 1 }),
			with(established, func(f *conntrack.Flow) { f.OrigDst = f.ReplySrc }),
			with(datagrams, func(f *conntrack.Flow) { f.Timeout = 0 }), // idle
		} {
			r.Ended(f)
		}
		expect(established)
		for _, f := range []conntrack.Flow{halfClosed, otherPort, datagrams} {
			r.Ended(f)
			time.Sleep(time.Second)
		}
		expect(established, halfClosed, otherPort, datagrams)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestConntrackRepairRedirects: the connections of a service that leaves userspace are redirected before
// it has left, those that were accepted meanwhile soon after, and all for as
// long as they last; others aren't.
func TestConntrackRepairRedirects(t *testing.T) {
	at := netip.MustParseAddrPort
	connection := func(k service.Key, client string) userspace.Connection {
		return userspace.Connection{Protocol: k.Protocol, Service: k, Client: at(client), Address: at("10.96.0.10:80")}
	}
	dns := service.Key{Namespace: "shop", Name: "dns", Protocol: service.UDP}
	gone := service.Key{Namespace: "shop", Name: "gone", Protocol: service.TCP}
	other := service.Key{Namespace: "shop", Name: "other", Protocol: service.TCP}
	inPlane := func(webs plan.DataPlane) *plan.Plan {
		return &plan.Plan{Services: []*plan.Service{
			{Port: &service.Port{Key: other}, DataPlane: plan.Userspace}, {Port: &service.Port{Key: web}, DataPlane: webs},
		}}
	}
	carried := []userspace.Connection{connection(web, "10.1.0.2:5000"), connection(other, "10.1.0.2:5001"), connection(dns, "10.1.0.2:5002")}
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // of the three
		var held []string
		current := inPlane(plan.Userspace)
		carried := carried
		r := &Repair{
			log: slog.New(slog.DiscardHandler), offloaded: make(chan struct{}, 1),
			connections: func() []userspace.Connection {
				mu.Lock()
				defer mu.Unlock()
				return carried
			},
			plan: func() *plan.Plan {
				mu.Lock()
				defer mu.Unlock()
				return current
			},
			redirect: func(d time.Duration, of []kernel.Redirected) error {
				mu.Lock()
				defer mu.Unlock()
				for _, x := range of {
					held = append(held, x.Client.String())
				}
				return nil
			},
		}
		expect := func(when string, want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if diff := cmp.Diff(want, held); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
			held = nil
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		first, next := current, inPlane(plan.IPVS)
		r.Follow(first, plan.Between(nil, first))
		time.Sleep(2 * redirectEvery)
		expect("all is in userspace")

		r.Follow(next, plan.Between(first, next))
		expect("it leaves", "10.1.0.2:5000")
		mu.Lock()
		current, carried = next, append(carried, connection(web, "10.1.0.2:5003"), connection(gone, "10.1.0.2:5004"))
		mu.Unlock()
		time.Sleep(redirectAgain)
		expect("soon after", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004")
		time.Sleep(redirectFor)
		expect("later", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004")

		r.RedirectAll(nil, redirectFor)
		expect("kproxy ends", "10.1.0.2:5000", "10.1.0.2:5001", "10.1.0.2:5003", "10.1.0.2:5004")
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
