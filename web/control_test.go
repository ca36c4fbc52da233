package web

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/lockfile"
)

// serveControl serves src's control socket and returns its path.
func serveControl(t *testing.T, src Source) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kproxy.sock")
	ln, err := ListenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Serve(ctx, ln, Control(APIConfig{Source: src, Recorder: NewRecorder(DefaultRecorderConfig(src))}, nil), slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return path
}

func TestClientReads(t *testing.T) {
	src := shop()
	c := NewClient(serveControl(t, src))
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(src.status, status, cmp.Comparer(equalAddrPort)); d != "" {
		t.Errorf("status (-want +got):\n%s", d)
	}
	conns, err := c.Connections(t.Context(), "shop/web")
	if err != nil || len(conns) != 2 {
		t.Errorf("connections of shop/web: got %d (%v), want 2", len(conns), err)
	}
	src.connErr = errors.New("no such thing")
	if _, err := c.Connections(t.Context(), ""); err == nil || err.Error() != "list connections: no such thing" {
		t.Errorf("connections that can't be listed: got %v, want the reason", err)
	}
}

func TestPin(t *testing.T) {
	src := shop()
	broken := src.status.Services[0]
	broken.Name = "broken"
	src.status.Services = append(src.status.Services, broken)
	c := NewClient(serveControl(t, src))
	tests := []struct {
		name    string
		req     PinRequest
		want    []string
		wantErr string
	}{
		{"every port", PinRequest{"shop", "web", "", "userspace"}, []string{"shop/web:http", "shop/web:http3"}, ""},
		{"port by name", PinRequest{"shop", "web", "http", "kernel"}, []string{"shop/web:http"}, ""},
		{"port by number", PinRequest{"shop", "web", "443", "auto"}, []string{"shop/web:http3"}, ""},
		{"port without name by number", PinRequest{"shop", "cart", "6379", "auto"}, []string{"shop/cart"}, ""},
		{"no service", PinRequest{"shop", "wbe", "", "auto"}, nil, "there is no service shop/wbe; `kproxy status` lists what there is"},
		{"no port", PinRequest{"shop", "web", "https", "auto"}, nil, `service shop/web has no port "https"; it has [http http3]`},
		{"no port, by number", PinRequest{"shop", "cart", "80", "auto"}, nil, `service shop/cart has no port "80"; it has [6379]`},
		{"no preference", PinRequest{"shop", "web", "", "fast"}, nil, `"fast" is not a preference; use userspace, kernel or auto`},
		{"source fails", PinRequest{"shop", "broken", "", "auto"}, nil, "pin shop/broken: state directory is read-only"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := c.Pin(t.Context(), tt.req)
			if d := cmp.Diff(tt.wantErr, errorText(err)); d != "" {
				t.Errorf("error (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.want, got.Pinned); d != "" {
				t.Errorf("pinned (-want +got):\n%s", d)
			}
		})
	}
	want := map[service.Key]service.Preference{
		{Namespace: "shop", Name: "web", Port: "http", Protocol: service.TCP}:  "kernel",
		{Namespace: "shop", Name: "web", Port: "http3", Protocol: service.UDP}: "auto",
		{Namespace: "shop", Name: "cart", Protocol: service.TCP}:               "auto",
	}
	if d := cmp.Diff(want, src.pins); d != "" {
		t.Errorf("pins in force (-want +got):\n%s", d)
	}
}

// A kproxy hangs up on a client that was starved for longer than it waits for a request, and on whom its successor or
// supervisor leaves; what such a client asks for happens all the same.
func TestClientAsksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ln, src, dials := listenPipe(t.Context()), shop(), 0
		served := make(chan error, 1)
		go func() {
			served <- Serve(ctx, ln, Control(APIConfig{Source: src, Recorder: NewRecorder(DefaultRecorderConfig(src))}, nil), slog.New(slog.DiscardHandler))
		}()
		starved := 1
		c := newClient("kproxy.sock", "http://kproxy", func(ctx context.Context) (net.Conn, error) {
			conn, err := ln.dial(ctx, "", "")
			if dials++; dials <= starved {
				time.Sleep(headerTimeout + time.Second)
			}
			return conn, err
		})
		pin := PinRequest{"shop", "web", "http", "kernel"}
		if got, err := c.Pin(ctx, pin); err != nil || len(got.Pinned) != 1 || len(src.pins) != 1 {
			t.Errorf("got %v, %v and %d pins; want one", got.Pinned, err, len(src.pins))
		}
		dials, starved = 0, 10
		if _, err := c.Pin(ctx, pin); !errors.Is(err, ErrNoAnswer) || dials != 2 {
			t.Errorf("got %v after %d connections, want ErrNoAnswer after 2", err, dials)
		}
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

func TestPinRefusesMalformedRequests(t *testing.T) {
	h := Control(APIConfig{Source: shop(), Recorder: NewRecorder(DefaultRecorderConfig(shop()))}, nil)
	for _, body := range []string{
		"", "{", "[]", `"x"`, `{"nmae":"web"}`, `{"namespace":"shop"} {}`, `{"namespace":1}`,
		`{"name":"` + strings.Repeat("x", maxPinBody) + `"}`,
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/pin", strings.NewReader(body)))
		if w.Code != http.StatusBadRequest {
			t.Errorf("body %.40q: got %d, want 400", body, w.Code)
		}
	}
	if w := get(h, "/pin"); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET /pin: got %d, want 405", w.Code)
	}
}

func TestClientSaysWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "kproxy.sock")
	_, err := NewClient(missing).Status(t.Context())
	want := "kproxy isn't running here: no control socket at " + missing + "; start it with kproxy run, or pass --socket"
	if !errors.Is(err, ErrNotRunning) || err.Error() != want {
		t.Errorf("no socket:\ngot  %v\nwant %s", err, want)
	}
	dead := deadSocket(t, filepath.Join(dir, "dead.sock"))
	if _, err = NewClient(dead).Status(t.Context()); !errors.Is(err, ErrNotRunning) || !strings.Contains(err.Error(), "no process listens") {
		t.Errorf("dead socket: got %v, want that no process listens", err)
	}
	denied := NewClient(missing).explain(&net.OpError{Err: &os.SyscallError{Err: fs.ErrPermission}})
	if !errors.Is(denied, fs.ErrPermission) || !strings.Contains(denied.Error(), "run this command as root") {
		t.Errorf("no permission: got %v, want that root can", denied)
	}
}

// deadSocket leaves a socket file behind as a killed process does.
func deadSocket(t *testing.T, path string) string {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestListenControl(t *testing.T) {
	dir := t.TempDir()
	path := deadSocket(t, filepath.Join(dir, "kproxy.sock"))
	ln, err := ListenControl(t.Context(), path)
	if err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode: got %v (%v), want 0600", info.Mode(), err)
	}
	if _, err := ListenControl(t.Context(), path); !errors.Is(err, ErrRunning) {
		t.Errorf("second kproxy: got %v, want ErrRunning", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the second kproxy removed the first one's socket: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after close the socket is still there (%v)", err)
	}
	again, err := ListenControl(t.Context(), path)
	if err != nil {
		t.Fatalf("after the first is gone: %v", err)
	}
	_ = again.Close()
}

// TestLockWaitsForItsHolder: a kproxy that is started while another one ends gets
// the lock when that has ended, and not before.
func TestLockWaitsForItsHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "kproxy.sock")
	told := make(chan error, 10)
	waiting := func(why error) { told <- why }
	first, err := LockControl(t.Context(), path, time.Minute, waiting)
	if err != nil || len(told) > 0 {
		t.Fatalf("nobody holds it, and it says %v after %d waits", err, len(told))
	}
	type outcome struct {
		lock *os.File
		err  error
	}
	got := make(chan outcome, 1)
	go func() {
		lock, err := LockControl(t.Context(), path, time.Minute, waiting)
		got <- outcome{lock, err}
	}()
	if why := <-told; !errors.Is(why, ErrRunning) || !strings.Contains(why.Error(), path) {
		t.Errorf("it waits because of %v, want ErrRunning and the socket", why)
	}
	if len(got) > 0 {
		t.Error("two hold the lock")
	}
	if err := lockfile.Release(first); err != nil {
		t.Fatal(err)
	}
	second := <-got
	if second.err != nil || len(told) > 0 {
		t.Fatalf("after the first has ended: %v, told %d times more", second.err, len(told))
	}
	defer lockfile.Release(second.lock)
	if _, err := LockControl(t.Context(), path, 0, waiting); !errors.Is(err, ErrRunning) {
		t.Errorf("without patience: %v, want ErrRunning", err)
	}
	if _, err := LockControl(t.Context(), path, time.Nanosecond, waiting); !errors.Is(err, ErrRunning) || len(told) != 1 {
		t.Errorf("when patience is over: %v after %d waits, want ErrRunning after one", err, len(told))
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if _, err := LockControl(stopped, path, time.Hour, waiting); !errors.Is(err, ErrRunning) {
		t.Errorf("told to stop: %v, want ErrRunning", err)
	}
}

func TestListenControlLeavesOthersFilesAlone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "notes.txt")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenControl(t.Context(), file); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("over a file: got %v, want a refusal", err)
	}
	foreign := filepath.Join(dir, "foreign.sock")
	ln, err := net.Listen("unix", foreign)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if _, err := ListenControl(t.Context(), foreign); !errors.Is(err, ErrRunning) {
		t.Errorf("over a socket somebody listens on: got %v, want ErrRunning", err)
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// answerFrom is h's answer to a client at ip.
func answerFrom(ctx context.Context, h http.Handler, ip, path string) int {
	r := httptest.NewRequest(http.MethodGet, "http://192.0.2.254"+path, nil).WithContext(ctx)
	r.RemoteAddr = ip + ":4321"
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code
}

// TestGreedyClientsWaitForThemselves: a client with fifty requests that take for
// ever has two of them answered at a time, and a hundred others are answered
// meanwhile, at most so many at once.
func TestGreedyClientsWaitForThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const greedy = "192.0.2.1"
		var mu sync.Mutex
		var atOnce, peak, ofGreedy int
		count := func(n *int, by int) {
			mu.Lock()
			defer mu.Unlock()
			*n += by
			peak = max(peak, atOnce)
		}
		ctx, giveUp := context.WithCancel(t.Context())
		h := newSlots(8, 2).bound(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			count(&atOnce, 1)
			defer count(&atOnce, -1)
			if clientOf(r.RemoteAddr).Addr().String() == greedy {
				count(&ofGreedy, 1)
				<-ctx.Done()
			}
		}))
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() { answerFrom(ctx, h, greedy, "/") })
		}
		synctest.Wait()
		if ofGreedy != 2 {
			t.Errorf("%d requests of one client are answered at once, want 2", ofGreedy)
		}
		var others sync.WaitGroup
		for i := range 100 {
			others.Go(func() {
				if code := answerFrom(t.Context(), h, fmt.Sprintf("198.51.100.%d", i), "/"); code != http.StatusOK {
					t.Errorf("another client: HTTP status %d", code)
				}
			})
		}
		others.Wait()
		if peak > 8 {
			t.Errorf("%d requests were answered at once, more than 8", peak)
		}
		giveUp()
		all.Wait()
	})
}

// slowSource answers nothing until goOn is closed.
type slowSource struct {
	*fakeSource
	begun chan bool
	goOn  chan bool
}

func (s slowSource) wait() {
	s.begun <- true
	<-s.goOn
}

func (s slowSource) Status() plan.Status {
	s.wait()
	return s.fakeSource.Status()
}

func (s slowSource) Connections(ctx context.Context) ([]plan.ConnectionStatus, error) {
	s.wait()
	return s.fakeSource.Connections(ctx)
}

// TestLongAnswersAreBounded: of what takes memory or time, a client gets two
// answers at a time, and all together eight. Further requests are refused after a
// while.
func TestLongAnswersAreBounded(t *testing.T) {
	for _, path := range []string{"/api/v1/status", "/api/v1/connections", "/proxyMode"} {
		for _, tt := range []struct{ clients, want int }{{1, 2}, {3, 6}, {20, 8}} {
			t.Run(fmt.Sprintf("%s for %d clients", path, tt.clients), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					src := slowSource{shop(), make(chan bool, 100), make(chan bool)}
					h := API(APIConfig{Source: src, Recorder: NewRecorder(DefaultRecorderConfig(src)), Gatherer: prometheus.NewRegistry()})
					codes := make(chan int, 100)
					for i := range 60 {
						go func() {
							codes <- answerFrom(t.Context(), h, fmt.Sprintf("198.51.100.%d", i%tt.clients), path)
						}()
					}
					synctest.Wait()
					if n := len(src.begun); n != tt.want {
						t.Errorf("%d are answered at once, want %d", n, tt.want)
					}
					for range 60 - tt.want {
						if code := <-codes; code != http.StatusServiceUnavailable {
							t.Errorf("one too many: HTTP status %d", code)
						}
					}
					close(src.goOn)
					for range tt.want {
						if code := <-codes; code != http.StatusOK {
							t.Errorf("HTTP status %d", code)
						}
					}
				})
			})
		}
	}
}
