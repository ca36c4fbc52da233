package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// TestKeeper: the connections of a service that leaves userspace are held before
// it has left, those that were accepted meanwhile soon after, and all for as
// long as they last; others aren't.
func TestKeeper(t *testing.T) {
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
		h := &keeper{
			log: slog.New(slog.DiscardHandler), moved: make(chan struct{}, 1),
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
			hold: func(d time.Duration, of []steering.Held) error {
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
		go func() { done <- h.run(ctx) }()
		first, next := current, inPlane(plan.IPVS)
		h.follow(first, plan.Between(nil, first))
		time.Sleep(2 * heldEvery)
		expect("all is in userspace")

		h.follow(next, plan.Between(first, next))
		expect("it leaves", "10.1.0.2:5000")
		mu.Lock()
		current, carried = next, append(carried, connection(web, "10.1.0.2:5003"), connection(gone, "10.1.0.2:5004"))
		mu.Unlock()
		time.Sleep(heldAgain)
		expect("soon after", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004")
		time.Sleep(heldFor)
		expect("later", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004", "10.1.0.2:5000", "10.1.0.2:5003", "10.1.0.2:5004")

		h.keep(nil, heldFor)
		expect("kproxy ends", "10.1.0.2:5000", "10.1.0.2:5001", "10.1.0.2:5003", "10.1.0.2:5004")
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
