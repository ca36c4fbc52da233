package conntrack

import (
	"errors"
	"net/netip"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// Many flows are looked up at once as each of them is by itself, those that
// there aren't among them, again and again, also from several goroutines.
func TestLookupAll(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		_, peers := server(t, netip.AddrPortFrom(loopback(f), listener))
		dst, local := at(f, services, 10, 53), netip.AddrPortFrom(loopback(f), listener)
		rewrite(t, dst, port(listener))
		var flows [][2]netip.AddrPort
		for i := range 2*lookupsAtOnce + 5 {
			client := at(f, clients, 2, 5000+uint16(i))
			if i%3 == 1 {
				flows = append(flows, [2]netip.AddrPort{local, client}) // nobody's
				continue
			}
			ask(t, client, dst)
			flows = append(flows, [2]netip.AddrPort{local, <-peers})
		}
		var want [][2]netip.AddrPort
		for _, flow := range flows {
			orig, client, err := c.Lookup(service.UDP, flow[0], flow[1])
			if err != nil && !errors.Is(err, ErrNotFound) {
				t.Fatal(err)
			}
			want = append(want, [2]netip.AddrPort{orig, client})
		}
		var wg sync.WaitGroup
		for range 2 * poolSize {
			wg.Go(func() {
				next := 0
				c.LookupAll(service.UDP, flows, func(i int, orig, client netip.AddrPort, err error) {
					if i != next {
						t.Errorf("%s: answer %d, want that of %d", f, i, next)
					}
					next++
					if got := [2]netip.AddrPort{orig, client}; got != want[i] || errors.Is(err, ErrNotFound) == orig.IsValid() {
						t.Errorf("%s: flow %d: %v, %v; Lookup says %v", f, i, got, err, want[i])
					}
				})
				if next != len(flows) {
					t.Errorf("%s: %d answers, want %d", f, next, len(flows))
				}
			})
		}
		wg.Wait()
	}
}

// Answers that don't fit into the socket's buffer are lost; nobody's look-up fails
// for it.
func TestLookupAllLosesAnswers(t *testing.T) {
	c := inNamespace(t)
	for _, s := range c.all {
		if err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil { // the kernel makes it 2304 bytes
			t.Fatal(err)
		}
	}
	pod := at(service.IPv4, pods, 2, 5353)
	server(t, pod)
	var flows [][2]netip.AddrPort
	for i := range lookupsAtOnce + 3 {
		client := at(service.IPv4, clients, 2, 5000+uint16(i))
		if flows = append(flows, [2]netip.AddrPort{pod, client}); i%5 != 4 {
			ask(t, client, pod)
		}
	}
	s := c.all[0]
	err := s.Do(lookupsAtOnce, func(b []byte, i int) []byte {
		return appendGet(b, service.UDP, flows[i][0], flows[i][1])
	}, func(int, []byte, error) {})
	if !errors.Is(err, nlmsg.ErrNoAnswer) {
		t.Fatalf("got %v; the test wants some answers to be lost", err)
	}
	c.LookupAll(service.UDP, flows, func(i int, orig, client netip.AddrPort, err error) {
		if i%5 == 4 {
			if !errors.Is(err, ErrNotFound) {
				t.Errorf("nobody's flow %d: got %s, %s, %v, want %v", i, orig, client, err, ErrNotFound)
			}
		} else if err != nil || orig != flows[i][0] || client != flows[i][1] {
			t.Errorf("flow %d: got %s, %s, %v, want %s, %s", i, orig, client, err, flows[i][0], flows[i][1])
		}
	})
}
