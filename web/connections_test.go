package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// polite clients of a listener that others are greedy at.
const polite = 100

// httpClient is one connection from an address of 127.0.0.0/8.
type httpClient struct {
	net.Conn
	r *bufio.Reader
}

func dialFrom(t *testing.T, from netip.Addr, to net.Addr) *httpClient {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: time.Minute}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return &httpClient{c, bufio.NewReader(c)}
}

func (c *httpClient) send(text string) { _, _ = io.WriteString(c, text) }

// ask sends a request and reads the answer.
func (c *httpClient) ask() error {
	c.send("GET /now HTTP/1.1\r\nHost: x\r\n\r\n")
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// TestGreedyClientsCostThePoliteNothing: whatever the greedy do with connections,
// a hundred polite clients get their answers, and keep their connections.
func TestGreedyClientsCostThePoliteNothing(t *testing.T) {
	tests := []struct {
		name string
		do   func(t *testing.T, c *httpClient) // what the greedy do with each of their connections
	}{
		{"nothing", func(*testing.T, *httpClient) {}},
		{"half a request", func(_ *testing.T, c *httpClient) { c.send("GET /now HTTP/1.1\r\nHost: x") }},
		{"rest after a request", func(_ *testing.T, c *httpClient) { _ = c.ask() }},
		{"requests that are never answered", func(_ *testing.T, c *httpClient) { c.send("GET /never HTTP/1.1\r\nHost: x\r\n\r\n") }},
	}
	for _, tt := range tests {
		for _, greedy := range []int{1, 8} {
			t.Run(fmt.Sprintf("%s, %d greedy", tt.name, greedy), func(t *testing.T) {
				open := serveWithin(t, NewConnections(256, slog.New(slog.DiscardHandler)))
				at := open.Addr()
				for i := range 400 {
					tt.do(t, dialFrom(t, netip.AddrFrom4([4]byte{127, 0, 1, byte(i % greedy)}), at))
				}
				var clients []*httpClient
				for i := range polite {
					c := dialFrom(t, netip.AddrFrom4([4]byte{127, 0, 2, byte(i)}), at)
					if err := c.ask(); err != nil {
						t.Fatalf("polite client %d: %v", i, err)
					}
					clients = append(clients, c)
				}
				for i := range 400 {
					tt.do(t, dialFrom(t, netip.AddrFrom4([4]byte{127, 0, 1, byte(i % greedy)}), at))
				}
				for i, c := range clients {
					if err := c.ask(); err != nil {
						t.Errorf("polite client %d, on its old connection: %v", i, err)
					}
				}
				open.mu.Lock()
				defer open.mu.Unlock()
				// One more for a moment: it is accepted before another is closed.
				if open.peak > 256+1 || open.peakOfClient > 64+1 {
					t.Errorf("%d connections were open, %d of a client; want at most 256 and 64", open.peak, open.peakOfClient)
				}
			})
		}
	}
}

// TestConnectionsThatRestGiveWay: where nobody is greedy and all are taken, one
// that rests gives way to a client that comes; one that is answered doesn't.
func TestConnectionsThatRestGiveWay(t *testing.T) {
	bounds := NewConnections(4, slog.New(slog.DiscardHandler))
	at := serveWithin(t, bounds).Addr()
	from := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 3, byte(i)}) }
	var busy []*httpClient
	for i := range 3 {
		c := dialFrom(t, from(i), at)
		c.send("GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := http.ReadResponse(c.r, nil); err != nil { // it has begun to answer
			t.Fatal(err)
		}
		busy = append(busy, c)
	}
	resting := dialFrom(t, from(3), at)
	if err := resting.ask(); err != nil {
		t.Fatal(err)
	}
	for active := 4; active > 3; time.Sleep(time.Millisecond) { // the server notes it after the answer
		active = 0
		bounds.mu.Lock()
		for _, o := range bounds.open {
			if o.active {
				active++
			}
		}
		bounds.mu.Unlock()
	}
	comes := dialFrom(t, from(4), at)
	if err := comes.ask(); err != nil {
		t.Errorf("the client that came: %v", err)
	}
	if err := resting.ask(); err == nil {
		t.Error("the connection that rested is still there, the fifth of four")
	}
	comes.send("GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := http.ReadResponse(comes.r, nil); err != nil {
		t.Fatal(err)
	}
	if err := dialFrom(t, from(5), at).ask(); err == nil {
		t.Error("a fifth client was answered while four answers were under way")
	}
	for i, c := range busy {
		if _, err := c.r.ReadByte(); err != nil {
			t.Errorf("answer %d was cut off: %v", i, err)
		}
	}
}

func TestClientsAreAddressesOrNetworks(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.7":               "192.0.2.7/32",
		"::ffff:192.0.2.7":        "192.0.2.7/32",
		"2001:db8:1:2:3:4:5:6":    "2001:db8:1:2::/64",
		"fe80::1:2:3:4%interface": "fe80::/64",
	} {
		a := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 80))
		if got := clientOf(a.String()).String(); got != want {
			t.Errorf("%s is client %s, want %s", address, got, want)
		}
	}
}

// serveWithin serves /now; /never, without an answer; and /long, whose answer
// goes on until the test ends.
func serveWithin(t *testing.T, bounds *Connections) *countingListener {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := &countingListener{Listener: tcp, open: map[netip.Addr]int{}}
	ctx, stop := context.WithCancel(context.Background())
	mux := http.NewServeMux()
	mux.HandleFunc("/now", func(w http.ResponseWriter, _ *http.Request) { plainText(w, http.StatusOK, "ok") })
	mux.HandleFunc("/never", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/long", func(w http.ResponseWriter, r *http.Request) {
		for out := (&eventWriter{to: w, ctl: http.NewResponseController(w)}); r.Context().Err() == nil; {
			if out.write([]byte("more\n")) != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	served := make(chan error, 1)
	go func() { served <- bounds.Serve(ctx, ln, mux) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return ln
}

// countingListener counts the connections that were open at a time.
type countingListener struct {
	net.Listener

	mu                      sync.Mutex
	open                    map[netip.Addr]int
	all, peak, peakOfClient int
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.count(c, 1)
	return &countedConn{Conn: c, closed: sync.OnceFunc(func() { l.count(c, -1) })}, nil
}

func (l *countingListener) count(c net.Conn, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
	l.open[from] += n
	l.all += n
	l.peak, l.peakOfClient = max(l.peak, l.all), max(l.peakOfClient, l.open[from])
}

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	err := c.Conn.Close()
	c.closed()
	return err
}
