package conntrack

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func port(p uint16) netip.AddrPort { return netip.AddrPortFrom(netip.Addr{}, p) }

func TestLookupRedirected(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		_, peers := server(t, netip.AddrPortFrom(loopback(f), listener))
		dst, client := at(f, services, 10, 53), at(f, clients, 2, 5000)
		rewrite(t, dst, port(listener))
		ask(t, client, dst)
		local := netip.AddrPortFrom(loopback(f), listener) // what OUTPUT redirects goes to loopback
		orig, real, err := c.Lookup(service.UDP, local, <-peers)
		if err != nil || orig != dst || real != client {
			t.Errorf("%s: got %s, %s, %v, want %s, %s", f, orig, real, err, dst, client)
		}
	}
}

// Two flows of one client port to two services look alike to the listener; the
// kernel gives the second another port.
func TestLookupTellsCollidingFlowsApart(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		_, peers := server(t, netip.AddrPortFrom(loopback(f), listener))
		client, local := at(f, clients, 2, 5000), netip.AddrPortFrom(loopback(f), listener)
		both := []netip.AddrPort{at(f, services, 10, 53), at(f, services, 11, 53)}
		rewrite(t, both[0], port(listener))
		rewrite(t, both[1], port(listener))
		socket, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(client)) // one port, not connected
		if err != nil {
			t.Fatal(err)
		}
		defer socket.Close()
		for _, dst := range both {
			if _, err := socket.WriteToUDPAddrPort([]byte("x"), dst); err != nil {
				t.Fatal(err)
			}
			orig, real, err := c.Lookup(service.UDP, local, <-peers)
			if err != nil || orig != dst || real != client {
				t.Errorf("%s: got %s, %s, %v, want %s, %s", f, orig, real, err, dst, client)
			}
		}
	}
}

func TestLookupDirect(t *testing.T) {
	c := inNamespace(t)
	local := netip.AddrPortFrom(loopback(service.IPv4), listener)
	_, peers := server(t, local)
	ask(t, at(service.IPv4, clients, 2, 5000), local)
	orig, _, err := c.Lookup(service.UDP, local, <-peers)
	if err != nil || orig != local {
		t.Errorf("got %s, %v, want the listener itself", orig, err)
	}
}

func TestLookupNotFound(t *testing.T) {
	c := inNamespace(t)
	server(t, at(service.IPv4, pods, 2, 5353))
	client, pod := at(service.IPv4, clients, 2, 5000), at(service.IPv4, pods, 2, 5353)
	ask(t, client, pod)
	for name, tuple := range map[string][2]netip.AddrPort{
		"nobody":          {pod, at(service.IPv4, clients, 3, 5000)},
		"other direction": {client, pod}, // the tuple exists, as an original one
		"IPv6":            {at(service.IPv6, pods, 2, 5353), at(service.IPv6, clients, 2, 5000)},
	} {
		if _, _, err := c.Lookup(service.UDP, tuple[0], tuple[1]); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: got %v, want %v", name, err, ErrNotFound)
		}
	}
	if _, err := c.GetByReply(service.TCP, pod, client); !errors.Is(err, ErrNotFound) {
		t.Errorf("another protocol: got %v, want %v", err, ErrNotFound)
	}
}

func TestLookupConcurrently(t *testing.T) {
	c := inNamespace(t)
	_, peers := server(t, netip.AddrPortFrom(loopback(service.IPv6), listener))
	dst := at(service.IPv6, services, 10, 53)
	rewrite(t, dst, port(listener))
	var seen []netip.AddrPort
	for i := range 16 {
		ask(t, at(service.IPv6, clients, 2, 5000+uint16(i)), dst)
		seen = append(seen, <-peers)
	}
	var wg sync.WaitGroup
	for range 4 {
		for _, peer := range seen {
			wg.Go(func() {
				for range 20 {
					orig, real, err := c.Lookup(service.UDP, netip.AddrPortFrom(loopback(service.IPv6), listener), peer)
					if err != nil || orig != dst || real != peer {
						t.Errorf("got %s, %s, %v, want %s, %s", orig, real, err, dst, peer)
					}
				}
			})
		}
	}
	wg.Wait()
}

func TestList(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		pod, dst, client := at(f, pods, 2, 5353), at(f, services, 10, 53), at(f, clients, 2, 5000)
		server(t, pod)
		rewrite(t, dst, pod)
		again(t, ask(t, client, dst))
		l, err := net.Listen("tcp", pod.String())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		conn, err := net.Dial("tcp", pod.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()

		got, ok := to(mustList(t, c, service.UDP), dst)[client]
		ipHeader := uint64(20)
		if f == service.IPv6 {
			ipHeader = 40
		}
		want := Flow{
			Family: f, Protocol: service.UDP, OrigSrc: client, OrigDst: dst, ReplySrc: pod, ReplyDst: client,
			OrigPackets: 2, OrigBytes: 2 * (ipHeader + 8 + 5), ReplyPackets: 2, ReplyBytes: 2 * (ipHeader + 8 + 5),
			Status: got.Status, Timeout: got.Timeout, ID: got.ID,
		}
		if !ok || got != want || got.ID == 0 || got.Timeout <= 0 {
			t.Errorf("%s: got %+v, want %+v with an ID and a time-out", f, got, want)
		}
		if again, err := c.GetByReply(service.UDP, pod, client); err != nil || again.ID != got.ID || again.OrigBytes != got.OrigBytes {
			t.Errorf("%s: got %+v, %v, want the same as in the list", f, again, err)
		}
	}
	protocols := func(p service.Protocol) (out []service.Protocol) {
		for _, f := range mustList(t, c, p) {
			if !slices.Contains(out, f.Protocol) {
				out = append(out, f.Protocol)
			}
		}
		return out
	}
	if got := protocols(0); len(got) != 2 {
		t.Errorf("protocols of all entries: %v, want TCP and UDP", got)
	}
	for _, p := range []service.Protocol{service.TCP, service.UDP} {
		if got := protocols(p); !slices.Equal(got, []service.Protocol{p}) {
			t.Errorf("protocols of %s entries: %v", p, got)
		}
	}
}

// What the kernel leaves out isn't decoded here.
func TestDumpIsFilteredByTheKernel(t *testing.T) {
	c := inNamespace(t)
	server(t, at(service.IPv4, pods, 2, 5353))
	ask(t, at(service.IPv4, clients, 2, 5000), at(service.IPv4, pods, 2, 5353))
	silent, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at(service.IPv4, pods, 2, 5354))) // nobody is there
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if _, err := silent.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	for w, want := range map[wanted]int{
		{protocol: service.UDP}: 2, {protocol: service.TCP}: 0,
		{protocol: service.UDP, unanswered: true}: 1, {protocol: service.TCP, unanswered: true}: 0, {unanswered: true}: 1,
	} {
		flows, err := c.dump(nil, service.IPv4, w, wanted{})
		if err != nil || len(flows) != want {
			t.Errorf("kernel's filter for %+v: %d entries, %v, want %d", w, len(flows), err, want)
		}
	}
}

func TestDeleteIsExact(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		pod, dst := at(f, pods, 2, 5353), at(f, services, 10, 53)
		server(t, pod)
		rewrite(t, dst, pod)
		one, two := at(f, clients, 2, 5000), at(f, clients, 2, 5001)
		conn := ask(t, one, dst)
		ask(t, two, dst)
		first := to(mustList(t, c, service.UDP), dst)[one]
		for range 2 { // the second finds nothing, which is no error
			if err := c.Delete(first); err != nil {
				t.Fatal(err)
			}
		}
		left := to(mustList(t, c, service.UDP), dst)
		if _, gone := left[one]; gone || len(left) != 1 {
			t.Errorf("%s: left %v, want the neighbour only", f, left)
		}
		// An entry with these tuples and another ID isn't the one to delete.
		again(t, conn)
		other := to(mustList(t, c, service.UDP), dst)[one]
		other.ID++
		if err := c.Delete(other); err != nil {
			t.Fatal(err)
		}
		if left := to(mustList(t, c, service.UDP), dst); len(left) != 2 {
			t.Errorf("%s: left %v, want both", f, left)
		}
	}
}

// The whole of it: an endpoint leaves, its flow is deleted and no other, and
// the client's next datagram goes elsewhere.
func TestStaleFlowGoesElsewhere(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		dst := at(f, services, 10, 53)
		gone, stays := at(f, pods, 3, 5353), at(f, pods, 2, 5353)
		_, atGone := server(t, gone)
		_, atStays := server(t, stays)
		rewrite(t, dst, stays)
		kept := ask(t, at(f, clients, 2, 5001), dst)
		<-atStays
		table(t, f, "-F", "OUTPUT")
		rewrite(t, dst, gone)
		moved := ask(t, at(f, clients, 2, 5000), dst)
		<-atGone
		table(t, f, "-F", "OUTPUT")
		rewrite(t, dst, stays)
		again(t, moved)
		<-atGone // rules don't reach a flow that has an entry

		k := udpKey("dns")
		stale := Stale(mustList(t, c, service.UDP), planOf(serviceOf(k, 10)), planOf(serviceOf(k, 10, withoutEndpoint(3))), StaleConfig{Local: isLocal})
		if len(stale) != 1 || stale[0].OrigSrc.Port() != 5000 {
			t.Fatalf("%s: stale %v, want the flow to %s", f, stale, gone)
		}
		if err := c.Delete(stale[0]); err != nil {
			t.Fatal(err)
		}
		again(t, moved)
		<-atStays
		again(t, kept)
		<-atStays
	}
}

func TestAccountingOfRealFlows(t *testing.T) {
	c := inNamespace(t)
	f := service.IPv4
	k := udpKey("dns")
	p := planOf(serviceOf(k, 10, func(s *plan.Service) { s.Frontends = s.Frontends[:2] }))
	accounting := NewAccounting(isLocal)
	setPlan(accounting, p)
	if err := accounting.Refresh(0, c.List); err != nil { // what is there before doesn't count
		t.Fatal(err)
	}
	l, err := Subscribe()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pod, dst := at(f, pods, 2, 5353), at(f, services, 10, 53)
	server(t, pod)
	rewrite(t, dst, pod)
	for i := range 3 {
		ask(t, at(f, clients, 2, 5000+uint16(i)), dst)
	}
	ask(t, at(f, clients, 2, 6000), pod) // not by the service
	packet := uint64(20 + 8 + 5)
	check := func(active int64) {
		t.Helper()
		if err := accounting.Refresh(0, c.List); err != nil {
			t.Fatal(err)
		}
		got := accounting.Figures()[k]
		want := Figures{Active: active, Total: 3, BytesIn: 3 * packet, BytesOut: 3 * packet}
		if got.Figures != want || got.Endpoints[pod] != want || len(accounting.Connections()) != int(active) {
			t.Errorf("got %+v and %d connections, want %+v", got, len(accounting.Connections()), want)
		}
	}
	check(3)
	if err := c.Delete(to(mustList(t, c, service.UDP), dst)[at(f, clients, 2, 5001)]); err != nil {
		t.Fatal(err)
	}
	check(2) // before its end is told
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := l.Run(ctx, func(f Flow) { accounting.Ended(f); cancel() }); err != nil {
		t.Fatal(err)
	}
	check(2) // and after
}

// TestRequestsAfterClose: they fail, none waits.
func TestRequestsAfterClose(t *testing.T) {
	c := inNamespace(t)
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	client, pod := at(service.IPv4, clients, 2, 5000), at(service.IPv4, pods, 2, 5353)
	f := flow(service.IPv4, service.UDP, at(service.IPv4, services, 10, 53), pod)
	_, _, lookup := c.Lookup(service.UDP, pod, client)
	_, list := c.List(service.UDP)
	for name, err := range map[string]error{"lookup": lookup, "list": list, "delete": c.Delete(f), "restore": c.Restore(f)} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("%s: got %v, want %v", name, err, fs.ErrClosed)
		}
	}
	found := 0
	c.LookupAll(service.UDP, make([][2]netip.AddrPort, 3), func(i int, _, _ netip.AddrPort, err error) {
		if found++; !errors.Is(err, fs.ErrClosed) {
			t.Errorf("flow %d: got %v, want %v", i, err, fs.ErrClosed)
		}
	})
	if found != 3 {
		t.Errorf("%d flows answered, want 3", found)
	}
}

func BenchmarkGetByReply(b *testing.B) {
	c := inNamespace(b)
	_, peers := server(b, netip.AddrPortFrom(loopback(service.IPv4), listener))
	dst := at(service.IPv4, services, 10, 53)
	rewrite(b, dst, port(listener))
	ask(b, at(service.IPv4, clients, 2, 5000), dst)
	peer, local := <-peers, netip.AddrPortFrom(loopback(service.IPv4), listener)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.GetByReply(service.UDP, local, peer); err != nil {
			b.Fatal(err)
		}
	}
}
