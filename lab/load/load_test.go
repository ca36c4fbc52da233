package load

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// serve answers connections on loopback until the test ends.
func serve(t *testing.T, handle func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

// once answers one request as change leaves it.
func once(change func([]byte) []byte) func(net.Conn) {
	return func(c net.Conn) {
		b := make([]byte, messageSize)
		if _, err := io.ReadFull(c, b); err == nil {
			c.Write(change(b))
		}
	}
}

func always(change func([]byte) []byte) func(net.Conn) {
	return func(c net.Conn) {
		for b := make([]byte, messageSize); ; {
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			if _, err := c.Write(change(b)); err != nil {
				return
			}
		}
	}
}

func same(b []byte) []byte { return b }

func damaged(b []byte) []byte {
	b[40] ^= 1
	return b
}

// confirm takes a stream and confirms as many bytes more as it is told to.
func confirm(more int) func(net.Conn) {
	return func(c net.Conn) {
		n, _ := io.Copy(io.Discard, c)
		c.Write(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(int(n)+more)), 0))
	}
}

// patientRun runs a load again in which nothing happened, or that should succeed and was
// late, as on a busy machine.
func patientRun(t *testing.T, l Load, succeeds bool) Outcome {
	t.Helper()
	for tries := 1; ; tries++ {
		out, err := Run(l)
		if err != nil {
			t.Fatal(err)
		}
		if nothing := out.Count+out.Failed == 0; !nothing && !(succeeds && out.Late()) || tries == 10 {
			return out
		}
		l.FirstPort += l.Count
	}
}

// Every fault is counted as failed.
func TestFailuresAreSeen(t *testing.T) {
	for _, tt := range []struct {
		name   string
		kind   Kind
		handle func(net.Conn)
		ok     bool
	}{
		{"exchanges", Exchange, always(same), true},
		{"exchanges with a damaged answer", Exchange, always(damaged), false},
		{"exchanges on a connection that ends", Exchange, once(same), false},
		{"short", Short, once(same), true},
		{"short with a damaged answer", Short, once(damaged), false},
		{"short with half an answer", Short, once(func(b []byte) []byte { return b[:32] }), false},
		{"short with too much of an answer", Short, once(func(b []byte) []byte { return append(b, 0) }), false},
		{"short without an answer", Short, func(net.Conn) {}, false},
		{"first", First, once(same), true},
		{"first with a damaged answer", First, once(damaged), false},
		{"first without an answer", First, func(net.Conn) {}, false},
		{"a stream", Bulk, confirm(0), true},
		{"a stream of which bytes are lost", Bulk, confirm(-1), false},
		{"a stream without confirmation", Bulk, func(c net.Conn) { io.Copy(io.Discard, c) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := Load{Kind: tt.kind, Targets: []netip.AddrPort{serve(t, tt.handle)}, Server: netip.MustParseAddr("127.0.0.1"), Conns: 3, Time: 50 * time.Millisecond}
			out := patientRun(t, l, tt.ok)
			if (out.Failed == 0) != tt.ok || tt.ok && out.Count == 0 {
				t.Errorf("%d succeeded and %d failed (%s); want it to be well: %v", out.Count, out.Failed, out.Error, tt.ok)
			}
		})
	}
}

func TestMarksTellWhatIsMissing(t *testing.T) {
	buffer := make([]byte, streamBuffer)
	mark(buffer, 0)
	c := serverConn{kind: Bulk}
	check := func(part []byte) { c.check(part) }
	check(buffer[:5000])
	check(buffer[5000:9000])
	if c.wrong != 0 || c.received != 9000 {
		t.Fatalf("of a whole stream %d marks are wrong after %d bytes", c.wrong, c.received)
	}
	check(buffer[10000:50000]) // a thousand bytes are missing
	if c.wrong == 0 {
		t.Error("missing bytes weren't noticed")
	}
}

// Only lateness may be the machine's fault.
func TestOutcomeThatIsLate(t *testing.T) {
	for _, tt := range []struct {
		name string
		Outcome
		want bool
	}{
		{"nothing came", Outcome{}, true},
		{"no answer", Outcome{Count: 1, Failed: 1, Error: errNoAnswer.Error()}, true},
		{"no answer to the first", Outcome{Failed: 1, Error: "client: begin session: " + errNoAnswer.Error()}, true},
		{"timed out", Outcome{Failed: 1, Error: unix.ETIMEDOUT.Error()}, true},
		{"all came", Outcome{Count: 1}, false},
		{"other bytes", Outcome{Failed: 1, Error: errWrong.Error()}, false},
		{"refused", Outcome{Failed: 1, Error: unix.ECONNREFUSED.Error()}, false},
	} {
		if got := tt.Late(); got != tt.want {
			t.Errorf("%s: late: %t, want %t", tt.name, got, tt.want)
		}
	}
}

// Every kind does what it says on the loopback interface, through the real server.
func TestEveryKind(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- Serve(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	here := netip.MustParseAddr("127.0.0.1")
	for _, k := range append(Kinds, First) {
		t.Run(string(k), func(t *testing.T) {
			l := Load{Kind: k, Targets: []netip.AddrPort{netip.AddrPortFrom(here, k.Port())}, Server: here, Conns: 3, Time: 50 * time.Millisecond, Sources: []netip.Addr{here}}
			bounded := k == Short || k == First || k == Session
			if bounded {
				l.Count, l.Time = 20, 10*time.Second
			}
			out := patientRun(t, l, true)
			if out.Count == 0 || out.Failed != 0 || out.Seconds <= 0 || bounded && out.Count != l.Count {
				t.Errorf("%d succeeded and %d failed in %g s (%s)", out.Count, out.Failed, out.Seconds, out.Error)
			}
			if (k == Bulk || k.large()) != (out.Bytes > 0) || (k == Bulk || k.large()) != (out.Exchange.Max == 0) || (k == First) != (out.Connect.Max > 0) {
				t.Errorf("%d bytes, exchanges %+v, connects %+v", out.Bytes, out.Exchange, out.Connect)
			}
			if len(out.Witnesses) == 0 || out.Witnesses[0].Target != l.Targets[0] || out.Witnesses[0].Client.Addr() != here {
				t.Errorf("witnesses %v", out.Witnesses)
			}
		})
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestPercentiles(t *testing.T) {
	var d []time.Duration
	for i := range 200 {
		d = append(d, time.Duration(200-i)*time.Microsecond)
	}
	for _, tt := range []struct {
		d    []time.Duration
		want Percentiles
	}{
		{nil, Percentiles{}},
		{d[:1], Percentiles{200, 200, 200}},
		{[]time.Duration{2 * time.Microsecond, time.Microsecond}, Percentiles{1, 2, 2}},
		{d, Percentiles{100, 198, 200}},
	} {
		if diff := cmp.Diff(tt.want, percentilesOf(slices.Clone(tt.d))); diff != "" {
			t.Errorf("percentiles of %d (-want +got):\n%s", len(tt.d), diff)
		}
	}
}
