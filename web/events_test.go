package web

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

// pipeListener hands out in-memory connections, so that a server and its time
// limits run under the fake clock of testing/synctest.
type pipeListener struct {
	conns chan net.Conn
	done  context.Context
	close context.CancelFunc
}

func listenPipe(ctx context.Context) *pipeListener {
	done, cancel := context.WithCancel(ctx)
	return &pipeListener{conns: make(chan net.Conn), done: done, close: cancel}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done.Done():
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.close(); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (l *pipeListener) dial(context.Context, string, string) (net.Conn, error) {
	here, there := net.Pipe()
	l.conns <- there
	return here, nil
}

func TestEventsOutliveTheServersTimeLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := shop()
		ctx, cancel := context.WithCancel(t.Context())
		ln := listenPipe(t.Context())
		served := make(chan error, 1)
		go func() { served <- Serve(ctx, ln, api(src), slog.New(slog.DiscardHandler)) }()

		client := &http.Client{Transport: &http.Transport{DialContext: ln.dial, DisableKeepAlives: true}}
		resp, err := client.Get("http://kproxy/api/v1/events")
		if err != nil {
			t.Fatal(err)
		}
		if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
			t.Errorf("content type: got %q, want text/event-stream", ct)
		}
		lines := make(chan string, 100)
		go func() {
			defer close(lines)
			for s := bufio.NewScanner(resp.Body); s.Scan(); {
				if s.Text() != "" {
					lines <- s.Text()
				}
			}
		}()

		time.Sleep(10 * writeTimeout) // silence far beyond every limit
		synctest.Wait()
		src.send(plan.Event{Time: start, Kind: "dataplane", Service: "shop/web:http", Message: "offloaded\nto iptables"})
		synctest.Wait()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		var got []string
		for l := range lines {
			if l != ": alive" {
				got = append(got, l)
			}
		}
		want := []string{
			"retry: 2000",
			"event: dataplane",
			`data: {"time":"2026-01-02T03:04:05Z","kind":"dataplane","service":"shop/web:http","message":"offloaded\nto iptables"}`,
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("stream (-want +got):\n%s", d)
		}
		if n := src.subscribers(); n != 0 {
			t.Errorf("%d subscriptions are left", n)
		}
		_ = resp.Body.Close()
	})
}

func TestEventStreamsAreBounded(t *testing.T) {
	s := newEventStream(shop())
	for i := range maxStreams {
		s.slots.try(clientOf(netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 80).String()))
	}
	w := get(s, "/api/v1/events")
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "64 event streams are open") {
		t.Errorf("got %d %s, want 503 with the reason", w.Code, w.Body)
	}
}

func TestServeEndsClientsThatStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ln := listenPipe(t.Context())
		served := make(chan error, 1)
		go func() { served <- Serve(ctx, ln, api(shop()), slog.New(slog.DiscardHandler)) }()
		c, _ := ln.dial(ctx, "", "")
		begun := time.Now()
		if _, err := c.Write([]byte("GET / HT")); err != nil {
			t.Fatal(err)
		}
		for b := make([]byte, 512); ; {
			if _, err := c.Read(b); err != nil {
				break
			}
		}
		if waited := time.Since(begun); waited != headerTimeout {
			t.Errorf("the connection ended after %s, want %s", waited, headerTimeout)
		}
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

// beginning notes how many subscribers a source has when a response begins.
type beginning struct {
	http.ResponseWriter
	src  *fakeSource
	once sync.Once
	had  chan int
}

func (w *beginning) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *beginning) Write(b []byte) (int, error) {
	w.once.Do(func() { w.had <- w.src.subscribers() })
	return w.ResponseWriter.Write(b)
}

// A client that has the beginning of the stream misses nothing that happens from then on.
func TestEventsFromTheBeginning(t *testing.T) {
	src := shop()
	stream, had := newEventStream(src), make(chan int, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		stream.ServeHTTP(&beginning{ResponseWriter: w, src: src, had: had}, r)
	}))
	defer server.Close()
	resp, err := server.Client().Get(server.URL) // which takes gzip
	if err != nil {
		t.Fatal(err)
	}
	if resp.Uncompressed {
		t.Error("a stream of few small events is compressed")
	}
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); line != "retry: 2000\n" {
		t.Errorf("the first line is %q: %v", line, err)
	}
	_ = resp.Body.Close()
	if n := <-had; n != 1 {
		t.Errorf("%d subscribers when the stream begins, want 1", n)
	}
}
