package conntrack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// subscribe listens for ends until the test does.
func subscribe(t *testing.T) *Listener {
	t.Helper()
	l, err := Subscribe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// clientsOfEnds returns the clients of the first n flows whose end is told, in order.
func clientsOfEnds(t *testing.T, l *Listener, n int) (got []netip.AddrPort) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := l.Run(ctx, func(f Flow) {
		if got = append(got, f.OrigSrc); len(got) == n {
			cancel()
		}
	}); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestEvents(t *testing.T) {
	c := inNamespace(t)
	pod, dst, client := at(service.IPv6, pods, 2, 5353), at(service.IPv6, services, 10, 53), at(service.IPv6, clients, 2, 5000)
	server(t, pod)
	rewrite(t, dst, pod)
	l := subscribe(t)
	ask(t, client, dst)
	listed := to(mustList(t, c, service.UDP), dst)[client]
	if err := c.Delete(listed); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var got Flow
	if err := l.Run(ctx, func(f Flow) { got = f; cancel() }); err != nil {
		t.Fatal(err)
	}
	want := listed
	want.Timeout, want.Status = got.Timeout, got.Status // an end has neither
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if n := l.Overflows(); n != 0 {
		t.Errorf("%d overflows, want none", n)
	}
}

func TestEventOverflowIsCounted(t *testing.T) {
	c := inNamespace(t)
	pod, dst := at(service.IPv4, pods, 2, 5353), at(service.IPv4, services, 10, 53)
	server(t, pod)
	rewrite(t, dst, pod)
	l := subscribe(t)
	var err error
	controlErr := l.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }) // the kernel's least
	if err := errors.Join(controlErr, err); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		ask(t, at(service.IPv4, clients, 2, 5000+uint16(i)), dst)
	}
	for _, f := range mustList(t, c, service.UDP) {
		if err := c.Delete(f); err != nil {
			t.Fatal(err)
		}
	}
	// Reading goes on after an overflow: there is an end to be told after it.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	last := at(service.IPv4, clients, 3, 6000)
	told := 0
	err = l.Run(ctx, func(f Flow) {
		if told++; f.OrigSrc == last {
			cancel()
			return
		}
		ask(t, last, dst)
		if err := c.Delete(to(mustList(t, c, service.UDP), dst)[last]); err != nil {
			t.Error(err)
		}
	})
	if err != nil || ctx.Err() != context.Canceled || l.Overflows() == 0 || told >= 50 {
		t.Errorf("got %v, %d overflows, %d ends told; want overflows and fewer ends than flows", err, l.Overflows(), told)
	}
}

// What nobody has rewritten isn't told, in either family, and doesn't stand in the
// way of what is.
func TestEventsOfRewrittenFlowsOnly(t *testing.T) {
	c := inNamespace(t)
	l := subscribe(t)
	var want []netip.AddrPort
	for _, f := range service.Families {
		// The second differs in its port only, the third in its address only.
		for i, pod := range []netip.AddrPort{at(f, pods, 2, 5353), at(f, services, 11, 5353), at(f, pods, 3, 53)} {
			dst, client := at(f, services, 10+i, 53), at(f, clients, 2, 5000+uint16(i))
			server(t, pod)
			rewrite(t, dst, pod)
			ask(t, at(f, clients, 3, 6000+uint16(i)), pod)
			ask(t, client, dst)
			want = append(want, client)
		}
	}
	for _, f := range mustList(t, c, service.UDP) {
		if err := c.Delete(f); err != nil {
			t.Fatal(err)
		}
	}
	got := clientsOfEnds(t, l, len(want))
	slices.SortFunc(got, netip.AddrPort.Compare)
	if !slices.Equal(got, want) {
		t.Errorf("ends told of clients %v, want %v", got, want)
	}
}

// Connections that were closed are kept back where their port says so. What was cut
// short isn't, nor what was answered from another port, nor a datagram's flow.
func TestEventsOfClosedConnections(t *testing.T) {
	c := inNamespace(t)
	l := subscribe(t)
	command(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_time_wait=1")
	command(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_close=1")
	var want []netip.AddrPort
	close := func(f service.Family, skipped uint16) Flow {
		r := redirect(t, c, f)
		r.must(l.SkipClosed(skipped))
		r.must(r.client.(*net.TCPConn).SetLinger(0))
		r.must(r.client.Close())
		r.must(r.server.Close())
		for range 600 { // a list clears away what has timed out
			if _, there := to(mustList(t, c, service.TCP), r.flow.OrigDst)[r.flow.OrigSrc]; !there {
				return r.flow
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Fatalf("%s hasn't ended", r.flow)
		return Flow{}
	}
	for _, f := range service.Families {
		close(f, listener)
		want = append(want, close(f, listener+1).OrigSrc)
		want = append(want, close(f, 0).OrigSrc)
		r := redirect(t, c, f)
		r.must(l.SkipClosed(listener))
		r.must(c.Delete(r.flow))
		want = append(want, r.flow.OrigSrc)
		r.must(r.client.(*net.TCPConn).SetLinger(0))
		r.must(r.client.Close())
		r.must(r.server.Close())
		_, peers := server(t, netip.AddrPortFrom(loopback(f), listener))
		src, dst := at(f, clients, 4, 5000), at(f, services, 10, 53)
		rewrite(t, dst, port(listener))
		ask(t, src, dst)
		<-peers
		r.must(c.Delete(to(mustList(t, c, service.UDP), dst)[src]))
		want = append(want, src)
	}
	got := clientsOfEnds(t, l, len(want))
	if !slices.Equal(got, want) {
		t.Errorf("ends told of clients %v, want %v", got, want)
	}
}
