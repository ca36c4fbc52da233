package traffic

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

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

// Whatever isn't as it should be is counted as failed, and what is isn't.
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
		{"a stream", Bulk, confirm(0), true},
		{"a stream of which bytes are lost", Bulk, confirm(-1), false},
		{"a stream without confirmation", Bulk, func(c net.Conn) { io.Copy(io.Discard, c) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := Load{Kind: tt.kind, Target: serve(t, tt.handle), Server: netip.MustParseAddr("127.0.0.1"), Conns: 3, Time: 50 * time.Millisecond}
			out, err := Run(l)
			if err != nil {
				t.Fatal(err)
			}
			if (out.Failed == 0) != tt.ok || tt.ok && out.Count == 0 {
				t.Errorf("%d succeeded and %d failed (%s); want it to be well: %v", out.Count, out.Failed, out.Error, tt.ok)
			}
		})
	}
}

func TestMarksTellWhatIsMissing(t *testing.T) {
	s := stream{buffer: make([]byte, streamBuffer)}
	s.mark()
	c := serverConn{kind: Bulk}
	check := func(part []byte) { c.check(part) }
	check(s.buffer[:5000])
	check(s.buffer[5000:9000])
	if c.wrong != 0 || c.received != 9000 {
		t.Fatalf("of a whole stream %d marks are wrong after %d bytes", c.wrong, c.received)
	}
	check(s.buffer[10000:50000]) // a thousand bytes are missing
	if c.wrong == 0 {
		t.Error("nobody saw that bytes are missing")
	}
}

func TestValidate(t *testing.T) {
	good := Load{Kind: Short, Target: netip.MustParseAddrPort("127.0.0.1:1"), Server: netip.MustParseAddr("127.0.0.1"), Conns: 1, Time: time.Second}
	if err := good.Validate(); err != nil {
		t.Errorf("good load: %v", err)
	}
	for name, change := range map[string]func(*Load){
		"kind":     func(l *Load) { l.Kind = "long" },
		"target":   func(l *Load) { l.Target = netip.AddrPort{} },
		"conns":    func(l *Load) { l.Conns = 0 },
		"time":     func(l *Load) { l.Time = time.Hour },
		"sessions": func(l *Load) { l.Kind = Session },
	} {
		l := good
		change(&l)
		if l.Validate() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Only what was late may be the machine's fault.
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
