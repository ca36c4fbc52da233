package conntrack

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// lookup is LookupAll for one flow.
func lookup(c *Client, p service.Protocol, local, client netip.AddrPort) (orig, realClient netip.AddrPort, err error) {
	c.LookupAll(p, [][2]netip.AddrPort{{local, client}}, func(_ int, o, r netip.AddrPort, failed error) { orig, realClient, err = o, r, failed })
	return orig, realClient, err
}

func port(p uint16) netip.AddrPort { return netip.AddrPortFrom(netip.Addr{}, p) }

func TestLookupRedirected(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		_, peers := server(t, netip.AddrPortFrom(loopback(f), listener))
		dst, client := at(f, services, 10, 53), at(f, clients, 2, 5000)
		rewrite(t, dst, port(listener))
		ask(t, client, dst)
		local := netip.AddrPortFrom(loopback(f), listener) // what OUTPUT redirects goes to loopback
		orig, real, err := lookup(c, service.UDP, local, <-peers)
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
			orig, real, err := lookup(c, service.UDP, local, <-peers)
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
	orig, _, err := lookup(c, service.UDP, local, <-peers)
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
		if _, _, err := lookup(c, service.UDP, tuple[0], tuple[1]); !errors.Is(err, ErrNotFound) {
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
					orig, real, err := lookup(c, service.UDP, netip.AddrPortFrom(loopback(service.IPv6), listener), peer)
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
	for _, tt := range []struct {
		family byte
		filter Wanted
		want   int
	}{
		{unix.AF_INET, Wanted{Protocol: service.UDP}, 2}, {unix.AF_INET, Wanted{Protocol: service.TCP}, 0}, {unix.AF_INET6, Wanted{Protocol: service.UDP}, 0},
		{unix.AF_INET, Wanted{Protocol: service.UDP, Unanswered: true}, 1}, {unix.AF_INET, Wanted{Protocol: service.TCP, Unanswered: true}, 0},
		{unix.AF_UNSPEC, Wanted{Unanswered: true}, 1}, {unix.AF_UNSPEC, Wanted{}, 2},
	} {
		flows, err := c.dump(nil, walk{family: tt.family, filter: tt.filter})
		if err != nil || len(flows) != tt.want {
			t.Errorf("kernel's filter for %+v of family %d: %d entries, %v, want %d", tt.filter, tt.family, len(flows), err, tt.want)
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

// TestDeleteUnanswered: clients of a service that wait for an answer of one endpoint are forgotten, and nobody else; where the
// kernel can't do that, nobody is.
func TestDeleteUnanswered(t *testing.T) {
	c := inNamespace(t)
	gone, other := at(service.IPv4, pods, 2, 80), at(service.IPv4, pods, 3, 80)
	toGone, toOther, inZone := at(service.IPv4, services, 10, 80), at(service.IPv4, services, 11, 80), at(service.IPv4, services, 12, 80)
	for dst, to := range map[netip.AddrPort]netip.AddrPort{toGone: gone, toOther: other, inZone: gone} {
		table(t, service.IPv4, "-A", "OUTPUT", "-p", "tcp", "-d", dst.Addr().String(), "--dport", "80", "-j", "DNAT", "--to-destination", to.String())
	}
	command(t, "iptables", "-w", "-t", "raw", "-A", "OUTPUT", "-d", inZone.Addr().String(), "-j", "CT", "--zone", "7")
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(gone))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var clients []netip.AddrPort
	dial := func(to netip.AddrPort) {
		clients = append(clients, at(service.IPv4, 1, 2, uint16(5000+len(clients))))
		d := net.Dialer{Timeout: 50 * time.Millisecond, LocalAddr: net.TCPAddrFromAddrPort(clients[len(clients)-1])}
		if c, err := d.Dial("tcp", to.String()); err == nil {
			t.Cleanup(func() { c.Close() })
		}
	}
	dial(toGone)
	command(t, "iptables", "-w", "-t", "raw", "-A", "PREROUTING", "-p", "tcp", "--dport", "80", "-j", "DROP")
	for _, to := range []netip.AddrPort{toGone, toOther, inZone, gone} {
		dial(to)
	}
	left := func() (out []netip.AddrPort) {
		for _, f := range mustList(t, c, service.TCP) {
			out = append(out, f.OrigSrc)
		}
		slices.SortFunc(out, netip.AddrPort.Compare)
		return out
	}
	want := slices.Clone(clients)
	if was := left(); !slices.Equal(was, want) {
		t.Fatalf("clients %v, want %v", was, want)
	}
	if err := c.DeleteUnanswered(gone, at(service.IPv6, pods, 2, 80)); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("with one of IPv6: %v, want %v", err, errors.ErrUnsupported)
	}
	if is := left(); !slices.Equal(is, want) {
		t.Errorf("left %v, want all", is)
	}
	release, err := kernel.Release()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteUnanswered(gone); err == nil {
		want = slices.Delete(want, 1, 2)
	} else if !errors.Is(err, unix.EINVAL) || !kernel.OlderThan(release, 6, 11) {
		t.Fatal(err)
	}
	if is := left(); !slices.Equal(is, want) {
		t.Errorf("left %v, want %v", is, want)
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
		if got.Figures != want || endpointFigures(got, pod) != want || len(accounting.Connections()) != int(active) {
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
	_, _, lookup := lookup(c, service.UDP, pod, client)
	_, list := c.List(Wanted{Protocol: service.UDP})
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
			orig, client, err := lookup(c, service.UDP, flow[0], flow[1])
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
	if !errors.Is(err, netlink.ErrNoAnswer) {
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

var comparer = cmpopts.EquateComparable(netip.AddrPort{})

// full is a message with every attribute that is decoded, and some that aren't.
func full(f service.Family) []byte {
	b := appendHeader(nil, f)
	b = appendTuple(b, ctaTupleOrig, service.TCP, at(f, clients, 9, 50000), at(f, services, 10, 53))
	b = appendTuple(b, ctaTupleReply, service.TCP, at(f, pods, 2, 5353), at(f, nodes, 1, 50001))
	b = netlink.Append(b, ctaStatus, 0, 0, 1, 0x8e)
	b = netlink.Append(b, ctaTimeout, 0, 0, 0, 120)
	b = netlink.Append(b, ctaMark, 0, 0, 0x40, 0)
	b = netlink.Append(b, ctaID, 0xde, 0xad, 0xbe, 0xef)
	b = netlink.Append(b, ctaZone, 0, 7)
	counters := func(packets, bytes uint64) func([]byte) []byte {
		return func(b []byte) []byte {
			b = netlink.Append(b, ctaCountersPackets, binary.BigEndian.AppendUint64(nil, packets)...)
			return netlink.Append(b, ctaCountersBytes, binary.BigEndian.AppendUint64(nil, bytes)...)
		}
	}
	b = netlink.AppendNested(b, ctaCountersOrig, counters(3, 300))
	b = netlink.AppendNested(b, ctaCountersReply, counters(2, 1<<40))
	b = netlink.AppendNested(b, ctaProtoInfo, func(b []byte) []byte {
		return netlink.AppendNested(b, ctaProtoInfoTCP, func(b []byte) []byte {
			return netlink.Append(b, ctaProtoInfoTCPState, tcpTimeWait)
		})
	})
	b = netlink.AppendNested(b, ctaTimestamp, func(b []byte) []byte {
		return netlink.Append(b, ctaTimestampStart, binary.BigEndian.AppendUint64(nil, uint64(1700000000*time.Second))...)
	})
	return netlink.Append(b, 999, 1, 2, 3)
}

func TestDecode(t *testing.T) {
	for _, f := range service.Families {
		got, err := decode(full(f))
		want := Flow{
			Family: f, Protocol: service.TCP,
			OrigSrc: at(f, clients, 9, 50000), OrigDst: at(f, services, 10, 53),
			ReplySrc: at(f, pods, 2, 5353), ReplyDst: at(f, nodes, 1, 50001),
			OrigPackets: 3, OrigBytes: 300, ReplyPackets: 2, ReplyBytes: 1 << 40,
			Mark: 0x4000, Status: 0x18e, Timeout: 2 * time.Minute, ID: 0xdeadbeef, Zone: 7,
			TCPState: tcpTimeWait, Start: time.Unix(1700000000, 0),
		}
		if diff := cmp.Diff(want, got, comparer); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", f, err, diff)
		}
		if got.Open() || !got.Rewritten() {
			t.Errorf("%s: open %v, rewritten %v; want a closed, rewritten flow", f, got.Open(), got.Rewritten())
		}
	}
}

// Cutting a message anywhere gives an error or a flow with fewer fields, and
// never another value in a field.
func TestDecodeCutShort(t *testing.T) {
	whole := full(service.IPv6)
	want, err := decode(whole)
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		got, err := decode(whole[:n])
		if err != nil {
			continue
		}
		if got.OrigSrc.IsValid() && got.OrigSrc != want.OrigSrc || got.ID != 0 && got.ID != want.ID || got.OrigBytes != 0 && got.OrigBytes != want.OrigBytes {
			t.Errorf("first %d bytes decode to %+v", n, got)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	cases := map[string]string{
		"nothing":               "",
		"family of a bridge":    "07000000",
		"attribute too long":    "02000000" + "ffff0300",
		"attribute too short":   "02000000" + "03000300",
		"IPv6 address in IPv4":  "02000000" + "1c000180" + "18000180" + "14000300" + "00000000000000000000000000000000",
		"status of two bytes":   "02000000" + "060003000000" + "0000",
		"counter of four bytes": "02000000" + "0c000980" + "0800010000000000",
	}
	for name, text := range cases {
		b, err := hex.DecodeString(text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if f, err := decode(b); err == nil {
			t.Errorf("%s: decoded to %+v, want an error", name, f)
		}
	}
}

// getBody is a request without the header of netlink.
func getBody(p service.Protocol, src, dst netip.AddrPort) []byte {
	return appendGet(nil, p, src, dst)[unix.NLMSG_HDRLEN:]
}

func FuzzDecode(f *testing.F) {
	for _, family := range service.Families {
		f.Add(full(family))
		f.Add(getBody(service.UDP, at(family, 1, 1, 1), at(family, 2, 2, 2)))
		f.Add(appendDump(nil, [2]byte{unix.AF_INET, unix.AF_INET6}[family], Wanted{Protocol: service.UDP, Unanswered: true})[unix.NLMSG_HDRLEN:])
		flow := flow(family, service.UDP, at(family, 1, 1, 1), at(family, 2, 2, 2))
		f.Add(appendDelete(nil, &flow)[unix.NLMSG_HDRLEN:])
	}
	f.Add([]byte{unix.AF_INET, 0, 0, 0, 4, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		flow, err := decode(b)
		if err != nil {
			return
		}
		_ = flow.String()
		again, err := decode(b)
		if err != nil || again != flow {
			t.Errorf("decoded to %+v, then to %+v, %v", flow, again, err)
		}
		for _, a := range []struct{ bits int }{{flow.OrigSrc.Addr().BitLen()}, {flow.ReplySrc.Addr().BitLen()}} {
			if a.bits != 0 && a.bits != flow.Family.Bits() {
				t.Errorf("address of %d bits in a flow of %s", a.bits, flow.Family)
			}
		}
	})
}

func FuzzRoundTrip(f *testing.F) {
	f.Add(uint16(1), uint16(2), []byte("0123456789abcdef"))
	f.Fuzz(func(t *testing.T, srcPort, dstPort uint16, raw []byte) {
		if len(raw) < 2 {
			return
		}
		for _, family := range service.Families {
			src, dst := at(family, int(raw[0]), int(raw[1]), srcPort), at(family, int(raw[1]), int(raw[0]), dstPort)
			got, err := decode(getBody(service.SCTP, src, dst))
			if err != nil || got.ReplySrc != src || got.ReplyDst != dst || got.Protocol != service.SCTP || got.Family != family {
				t.Errorf("%s > %s came back as %+v, %v", src, dst, got, err)
			}
		}
	})
}
