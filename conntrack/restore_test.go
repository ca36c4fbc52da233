package conntrack

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// redirected is a TCP connection that a rule led to a listener; the rule is
// gone, so nothing but the table knows where its packets go.
type redirected struct {
	t              testing.TB
	table          *Client
	client, server net.Conn
	flow           Flow
}

func redirect(t testing.TB, table *Client, f service.Family) *redirected {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(loopback(f), listener).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, dst := at(f, clients, 2, 5000), at(f, services, 10, 80)
	rule := []string{"OUTPUT", "-p", "tcp", "-d", dst.Addr().String(), "--dport", "80", "-j", "REDIRECT", "--to-ports", fmt.Sprint(listener)}
	tableRule(t, f, "-A", rule)
	defer tableRule(t, f, "-D", rule)
	r := &redirected{t: t, table: table}
	if r.client, err = net.DialTCP("tcp", net.TCPAddrFromAddrPort(client), net.TCPAddrFromAddrPort(dst)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.client.Close() })
	if r.server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.server.Close() })
	r.works()
	r.flow = to(mustList(t, table, service.TCP), dst)[client]
	return r
}

func tableRule(t testing.TB, f service.Family, do string, rule []string) {
	t.Helper()
	table(t, f, append([]string{do}, rule...)...)
}

// works sends a line each way.
func (r *redirected) works() {
	r.t.Helper()
	for _, pair := range [][2]net.Conn{{r.client, r.server}, {r.server, r.client}} {
		for _, c := range pair {
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		}
		if _, err := io.WriteString(pair[0], "hello\n"); err != nil {
			r.t.Fatal(err)
		}
		if line, err := bufio.NewReader(pair[1]).ReadString('\n'); err != nil {
			r.t.Fatalf("%s, from %s: %q, %v", r.flow, pair[0].LocalAddr(), line, err)
		}
	}
}

func (r *redirected) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestRestore: a connection whose entry was deleted goes on when it is put
// back, with the same translation, whatever rules say now.
func TestRestore(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		r := redirect(t, c, f)
		r.must(c.Delete(r.flow))
		r.must(c.Restore(r.flow))
		got := to(mustList(t, c, service.TCP), r.flow.OrigDst)[r.flow.OrigSrc]
		if got.ReplySrc != r.flow.ReplySrc || got.ReplyDst != r.flow.ReplyDst || got.TCPState != tcpEstablished || !got.Answered() {
			t.Errorf("%s: restored %+v, want it like %+v", f, got, r.flow)
		}
		r.must(c.Restore(r.flow)) // no error although it is there
		r.works()
	}
}

// TestRestoreKeepsState: also of a connection that is half closed.
func TestRestoreKeepsState(t *testing.T) {
	c := inNamespace(t)
	r := redirect(t, c, service.IPv4)
	r.must(r.client.(*net.TCPConn).CloseWrite())
	if _, err := io.ReadAll(r.server); err != nil {
		t.Fatal(err)
	}
	r.flow = to(mustList(t, c, service.TCP), r.flow.OrigDst)[r.flow.OrigSrc]
	r.must(c.Delete(r.flow))
	r.must(c.Restore(r.flow))
	if got := to(mustList(t, c, service.TCP), r.flow.OrigDst)[r.flow.OrigSrc]; got.TCPState != r.flow.TCPState {
		t.Errorf("restored state %d, want %d", got.TCPState, r.flow.TCPState)
	}
	_, err := io.WriteString(r.server, "the rest\n")
	r.must(err)
	r.must(r.server.Close())
	_ = r.client.SetDeadline(time.Now().Add(10 * time.Second))
	if b, err := io.ReadAll(r.client); err != nil || string(b) != "the rest\n" {
		t.Errorf("the client read %q, %v, want the rest", b, err)
	}
}

// TestRestoreOverAnAnswer: when the listener has sent something before the entry
// is back, conntrack has an entry that begins with the answer.
func TestRestoreOverAnAnswer(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		r := redirect(t, c, f)
		// The client must not see it: it would refuse a packet from a stranger.
		name := map[service.Family]string{service.IPv4: "iptables", service.IPv6: "ip6tables"}[f]
		command(t, name, "-w", "-t", "mangle", "-A", "INPUT", "-p", "tcp", "--sport", fmt.Sprint(listener), "-j", "DROP")
		r.must(c.Delete(r.flow))
		_, err := io.WriteString(r.server, "lost\n")
		r.must(err)
		r.must(c.Restore(r.flow)) // the listener's port isn't the source any more
		_ = r.client.SetDeadline(time.Now().Add(20 * time.Second))
		line, err := bufio.NewReader(r.client).ReadString('\n') // when it is sent again
		if err != nil || line != "lost\n" {
			t.Errorf("%s: the client read %q, %v, want what was sent meanwhile", f, line, err)
		}
	}
}

// TestRestoreLeavesOthersAlone: a flow of the client's that has come since.
func TestRestoreLeavesOthersAlone(t *testing.T) {
	c := inNamespace(t)
	src, dst := at(service.IPv4, clients, 2, 5000), at(service.IPv4, services, 10, 53)
	server(t, dst)
	ask(t, src, dst)
	f := Flow{Family: service.IPv4, Protocol: service.UDP, OrigSrc: src, OrigDst: dst, ReplySrc: netip.AddrPortFrom(loopback(service.IPv4), listener), ReplyDst: src}
	if err := c.Restore(f); err != nil {
		t.Fatal(err)
	}
	if got := to(mustList(t, c, service.UDP), dst)[src]; got.Rewritten() {
		t.Errorf("the client's flow is %s now, want it as it was", got)
	}
}

// TestRestoreAnotherPort: where the kernel had given the client another port to
// keep two flows apart, it has that again.
func TestRestoreAnotherPort(t *testing.T) {
	c := inNamespace(t)
	for _, family := range service.Families {
		src, dst := at(family, clients, 2, 5000), at(family, services, 10, 53)
		f := Flow{
			Family: family, Protocol: service.UDP, OrigSrc: src, OrigDst: dst, Mark: 0x800,
			ReplySrc: netip.AddrPortFrom(loopback(family), listener), ReplyDst: at(family, clients, 2, 6000),
		}
		if err := c.Restore(f); err != nil {
			t.Fatal(err)
		}
		got := to(mustList(t, c, service.UDP), dst)[src]
		if got.ReplySrc != f.ReplySrc || got.ReplyDst != f.ReplyDst || got.Mark != f.Mark {
			t.Errorf("restored %+v, want %+v", got, f)
		}
		orig, client, err := lookup(c, service.UDP, f.ReplySrc, f.ReplyDst)
		if err != nil || orig != dst || client != src {
			t.Errorf("looked up %s, %s, %v, want %s, %s", orig, client, err, dst, src)
		}
	}
}

// TestCutShort goes by what the kernel itself tells of the ends of flows.
func TestCutShort(t *testing.T) {
	c := inNamespace(t)
	ended := endsOf(t)
	r := redirect(t, c, service.IPv4)
	src, dst := at(service.IPv4, clients, 3, 5000), at(service.IPv4, services, 11, 53)
	pod := at(service.IPv4, pods, 2, 5353)
	server(t, pod)
	rewrite(t, dst, pod)
	ask(t, src, dst)
	datagrams := to(mustList(t, c, service.UDP), dst)[src]
	for _, f := range []Flow{r.flow, datagrams} {
		r.must(c.Delete(f))
		r.must(c.Restore(f))
		if f := endOf(t, c, ended, f); !f.CutShort() {
			t.Errorf("%s was deleted: state %d, time left %s, not taken for cut short", f, f.TCPState, f.Timeout)
		}
	}
	// What is over has the kernel's own time-outs.
	for _, name := range []string{"tcp_timeout_time_wait", "tcp_timeout_close", "udp_timeout", "udp_timeout_stream"} {
		command(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_"+name+"=1")
	}
	r.must(r.client.Close())
	r.must(r.server.Close())
	if f := endOf(t, c, ended, r.flow); f.CutShort() {
		t.Errorf("%s was closed: state %d, time left %s, taken for cut short", f, f.TCPState, f.Timeout)
	}
	r = redirect(t, c, service.IPv6)
	r.must(r.client.(*net.TCPConn).SetLinger(0))
	r.must(r.client.Close())
	if f := endOf(t, c, ended, r.flow); f.CutShort() {
		t.Errorf("%s was reset: state %d, time left %s, taken for cut short", f, f.TCPState, f.Timeout)
	}
	src = at(service.IPv4, clients, 4, 5000)
	ask(t, src, dst)
	datagrams.OrigSrc = src
	if f := endOf(t, c, ended, datagrams); f.CutShort() {
		t.Errorf("%s was idle: time left %s, taken for cut short", f, f.Timeout)
	}
}

// endOf waits for the end of a flow with the original tuple of f.
func endOf(t testing.TB, c *Client, ended <-chan Flow, f Flow) Flow {
	t.Helper()
	for range 600 {
		select {
		case got := <-ended:
			if got.OrigSrc == f.OrigSrc && got.OrigDst == f.OrigDst {
				return got
			}
		case <-time.After(100 * time.Millisecond):
			mustList(t, c, 0) // a list clears away what has timed out
		}
	}
	t.Fatalf("%s hasn't ended", f)
	return Flow{}
}

// endsOf tells of the flows that end from now on, as long as the test takes.
func endsOf(t testing.TB) <-chan Flow {
	t.Helper()
	l, err := Subscribe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	flows, done := make(chan Flow, 100), make(chan struct{})
	go func() {
		defer close(done)
		_ = l.Run(ctx, func(f Flow) { flows <- f })
	}()
	t.Cleanup(func() { stop(); <-done; l.Close() })
	return flows
}
