package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpchealth "google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// long is a time-out that only a broken test runs into; short is one that is
// meant to pass.
const (
	long  = 20 * time.Second
	short = 100 * time.Millisecond
)

// listenTCP serves each connection on a port of a loopback address with serve,
// which owns it.
func listenTCP(t *testing.T, host string, serve func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
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
			go serve(c.(*net.TCPConn))
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// silent accepts and says nothing.
func silent(c *net.TCPConn) {
	defer c.Close()
	var b [1024]byte
	for {
		if _, err := c.Read(b[:]); err != nil {
			return
		}
	}
}

func resetting(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// answering answers the first bytes it gets with these.
func answering(answer string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		defer c.Close()
		var b [4096]byte
		if _, err := c.Read(b[:]); err == nil {
			c.Write([]byte(answer))
			c.CloseWrite()
			c.Read(b[:])
		}
	}
}

// refusing returns an address on which nothing listens.
func refusing(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// hanging returns an address that doesn't answer connects: its backlog is full
// of connections that nobody accepts.
func hanging(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*syscall.SockaddrInet4).Port))
	for range 3 {
		c, err := net.DialTimeout("tcp", addr.String(), short)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("a socket with a backlog of 0 accepts three connections")
	return addr
}

// check makes one probe and compares its error with want: empty for up.
func check(t *testing.T, addr netip.AddrPort, c service.HealthCheck, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), c.Timeout)
	defer cancel()
	err := Network{}.Probe(ctx, health.Target{Address: addr, Check: c})
	got := ""
	if err != nil {
		got = err.Error()
		if Inconclusive(err) {
			t.Errorf("%s %s is inconclusive: %v", c.Kind, addr, err)
		}
	}
	if got != want {
		t.Errorf("%s %s: %q, want %q", c.Kind, addr, got, want)
	}
}

func TestTCP(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		for name, tt := range map[string]struct {
			addr    netip.AddrPort
			timeout time.Duration
			want    string
		}{
			"accepts and says nothing": {listenTCP(t, host, silent), long, ""},
			"accepts and resets":       {listenTCP(t, host, resetting), long, ""},
			"refuses":                  {refusing(t, host), long, "connect: connection refused"},
		} {
			t.Run(host+" "+name, func(t *testing.T) {
				check(t, tt.addr, service.HealthCheck{Kind: service.CheckTCP, Timeout: tt.timeout}, tt.want)
			})
		}
	}
	t.Run("hangs", func(t *testing.T) {
		check(t, hanging(t), service.HealthCheck{Kind: service.CheckTCP, Timeout: short}, "no answer within 100ms")
	})
	t.Run("a port of its own", func(t *testing.T) {
		up := listenTCP(t, "127.0.0.1", silent)
		other := netip.AddrPortFrom(up.Addr(), refusing(t, "127.0.0.1").Port())
		check(t, other, service.HealthCheck{Kind: service.CheckTCP, Timeout: long, Port: up.Port()}, "")
	})
}

func TestTCPClosesWithReset(t *testing.T) {
	ended := make(chan error, 1)
	addr := listenTCP(t, "127.0.0.1", func(c *net.TCPConn) {
		defer c.Close()
		_, err := c.Read(make([]byte, 1))
		ended <- err
	})
	check(t, addr, service.HealthCheck{Kind: service.CheckTCP, Timeout: long}, "")
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server saw the probe's connection end with %v, want a reset", err)
	}
}

func TestHTTP(t *testing.T) {
	handler := http.NewServeMux()
	for _, status := range []int{200, 204, 302, 399, 400, 404, 500, 503} {
		handler.HandleFunc(fmt.Sprintf("/%d", status), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/500")
			w.WriteHeader(status)
		})
	}
	handler.HandleFunc("/early", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusOK)
	})
	handler.HandleFunc("/big", func(w http.ResponseWriter, _ *http.Request) {
		w.Write(make([]byte, 1<<20))
	})
	handler.HandleFunc("/endless", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	handler.HandleFunc("/query", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "deep=1" || r.Method != http.MethodGet {
			w.WriteHeader(http.StatusBadRequest)
		}
	})
	var addr netip.AddrPort
	handler.HandleFunc("/host", func(w http.ResponseWriter, r *http.Request) {
		if r.Host != addr.String() {
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	})
	server := httptest.NewServer(handler)
	defer server.Close()
	addr = server.Listener.Addr().(*net.TCPAddr).AddrPort()
	for path, want := range map[string]string{
		"/200": "", "/204": "", "/302": "", "/399": "", "200": "",
		"/400": "HTTP status 400", "/404": "HTTP status 404", "/500": "HTTP status 500", "/503": "HTTP status 503",
		"": "HTTP status 404", "/early": "", "/big": "", "/endless": "", "/query?deep=1": "", "/host": "",
	} {
		check(t, addr, service.HealthCheck{Kind: service.CheckHTTP, Path: path, Timeout: long}, want)
	}
}

func TestHTTPFaults(t *testing.T) {
	http := service.HealthCheck{Kind: service.CheckHTTP, Path: "/", Timeout: long}
	brief := http
	brief.Timeout = short
	tests := map[string]struct {
		addr  netip.AddrPort
		check service.HealthCheck
		want  string // its beginning
	}{
		"refuses":            {refusing(t, "127.0.0.1"), http, "connect: connection refused"},
		"hangs":              {hanging(t), brief, "no answer within 100ms"},
		"says nothing":       {listenTCP(t, "127.0.0.1", silent), brief, "no answer within 100ms"},
		"closes":             {listenTCP(t, "127.0.0.1", answering("")), http, "connection closed without an answer"},
		"speaks otherwise":   {listenTCP(t, "127.0.0.1", answering("220 mail.example ESMTP\r\n")), http, `malformed HTTP`},
		"stops in a header":  {listenTCP(t, "127.0.0.1", answering("HTTP/1.1 200 OK\r\nX-A: b\r\n")), http, "connection closed without an answer"},
		"endless header":     {listenTCP(t, "127.0.0.1", answering("HTTP/1.1 200 OK\r\n"+strings.Repeat("X-A: b\r\n", 20_000))), http, "header longer than 65536 bytes"},
		"endlessly informs":  {listenTCP(t, "127.0.0.1", answering(strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 20))), http, "more than 8 informational answers"},
		"minimal answer":     {listenTCP(t, "127.0.0.1", answering("HTTP/1.0 200 OK\r\n\r\n")), http, ""},
		"nonsensical path":   {refusing(t, "127.0.0.1"), service.HealthCheck{Kind: service.CheckHTTP, Path: "/\x7f", Timeout: long}, "make a request for path"},
		"body that's cut":    {listenTCP(t, "127.0.0.1", answering("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")), http, ""},
		"status out of HTTP": {listenTCP(t, "127.0.0.1", answering("HTTP/1.1 999 Odd\r\n\r\n")), http, "HTTP status 999"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tt.check.Timeout)
			defer cancel()
			got := ""
			if err := (Network{}).Probe(ctx, health.Target{Address: tt.addr, Check: tt.check}); err != nil {
				got = err.Error()
			}
			if !strings.HasPrefix(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestHTTPResetInsteadOfAnswer(t *testing.T) {
	addr := listenTCP(t, "127.0.0.1", func(c *net.TCPConn) {
		c.Read(make([]byte, 10))
		resetting(c)
	})
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	err := Network{}.Probe(ctx, health.Target{Address: addr, Check: service.HealthCheck{Kind: service.CheckHTTP, Timeout: long}})
	if err == nil || strings.Contains(err.Error(), "127.0.0.1") {
		t.Errorf("error %v, want one without addresses", err)
	}
}

// expired returns a context whose time is over.
func expired(t *testing.T) context.Context {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	t.Cleanup(cancel)
	return ctx
}

func TestUDP(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		serve := func(answer []byte) (netip.AddrPort, chan int) {
			c, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			sizes := make(chan int, 10)
			go func() {
				var b [2048]byte
				for {
					n, from, err := c.ReadFrom(b[:])
					if err != nil {
						return
					}
					sizes <- n
					if answer != nil {
						c.WriteTo(answer, from)
					}
				}
			}()
			return c.LocalAddr().(*net.UDPAddr).AddrPort(), sizes
		}
		udp := service.HealthCheck{Kind: service.CheckUDP, Timeout: long}
		addr, sizes := serve([]byte("hello"))
		check(t, addr, udp, "")
		if n := <-sizes; n != 0 {
			t.Errorf("the server got a datagram of %d bytes, want an empty one", n)
		}
		addr, _ = serve([]byte{})
		check(t, addr, udp, "")
		check(t, refusing(t, host), udp, "ICMP port unreachable")
		addr, _ = serve(nil)
		udp.Timeout = time.Second // a busy machine has to send the datagram within it
		check(t, addr, udp, health.ErrSilent.Error())
		if err := (Network{}).Probe(expired(t), health.Target{Address: addr, Check: udp}); !Inconclusive(err) {
			t.Errorf("a datagram that wasn't sent in time is held against the endpoint: %v", err)
		}
	}
}

func TestGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv, state := grpc.NewServer(), grpchealth.NewServer()
	state.SetServingStatus("ready", grpc_health_v1.HealthCheckResponse_SERVING)
	state.SetServingStatus("starting", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	grpc_health_v1.RegisterHealthServer(srv, state)
	go srv.Serve(l)
	defer srv.Stop()
	bare, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	without := grpc.NewServer()
	go without.Serve(bare)
	defer without.Stop()
	addr, bareAddr := l.Addr().(*net.TCPAddr).AddrPort(), bare.Addr().(*net.TCPAddr).AddrPort()
	tests := map[string]struct {
		addr    netip.AddrPort
		name    string
		timeout time.Duration
		want    string
	}{
		"the whole server":      {addr, "", long, ""},
		"serving":               {addr, "ready", long, ""},
		"not serving":           {addr, "starting", long, `service "starting" is NOT_SERVING`},
		"not known":             {addr, "other", long, `service "other" is not known to the server`},
		"without health":        {bareAddr, "", long, "the server doesn't implement grpc.health.v1.Health"},
		"refuses":               {refusing(t, "127.0.0.1"), "", long, "connect: connection refused"},
		"hangs":                 {hanging(t), "", short, "no answer within 100ms"},
		"accepts, says nothing": {listenTCP(t, "127.0.0.1", silent), "", short, "no answer within 100ms"},
		"resets":                {listenTCP(t, "127.0.0.1", resetting), "", long, "connection lost, or the server doesn't speak gRPC"},
		"speaks HTTP/1":         {listenTCP(t, "127.0.0.1", answering("HTTP/1.1 400 Bad Request\r\n\r\n")), "", long, "connection lost, or the server doesn't speak gRPC"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			check(t, tt.addr, service.HealthCheck{Kind: service.CheckGRPC, Path: tt.name, Timeout: tt.timeout}, tt.want)
		})
	}
}

func TestProbesStopWithContext(t *testing.T) {
	accepted := make(chan struct{}, 8)
	addr := listenTCP(t, "127.0.0.1", func(c *net.TCPConn) {
		accepted <- struct{}{}
		silent(c)
	})
	for _, kind := range []service.Check{service.CheckHTTP, service.CheckGRPC} {
		ctx, cancel := context.WithTimeout(t.Context(), long)
		done := make(chan error, 1)
		go func() {
			done <- Network{}.Probe(ctx, health.Target{Address: addr, Check: service.HealthCheck{Kind: kind, Timeout: long}})
		}()
		<-accepted
		cancel()
		if err := <-done; err == nil {
			t.Errorf("%s: a probe that was stopped found the endpoint up", kind)
		}
	}
}

func TestMark(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: SO_MARK takes CAP_NET_ADMIN")
	}
	addr := listenTCP(t, "127.0.0.1", silent)
	for _, network := range []string{"tcp", "udp"} {
		c, err := Network{Mark: 0x1800}.dialer().Dial(network, addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		raw, err := c.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		mark := 0
		if failed := raw.Control(func(fd uintptr) { mark, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK) }); failed != nil || err != nil || mark != 0x1800 {
			t.Errorf("%s: socket has mark %#x (%v, %v), want 0x1800", network, mark, failed, err)
		}
	}
}

// TestMarkThatFails: without the right to set it, nothing is held against the endpoint.
func TestMarkThatFails(t *testing.T) {
	c, err := net.ListenUDP("udp", nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := (Network{Mark: 1}).SetMark("", "", raw); !Inconclusive(err) {
		t.Errorf("error %v is held against the endpoint", err)
	}
}

func TestInconclusive(t *testing.T) {
	op := func(errno syscall.Errno) error {
		return describe(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", errno)}, time.Second)
	}
	for err, want := range map[error]bool{
		op(syscall.EMFILE): true, op(syscall.ENFILE): true, op(syscall.ENOBUFS): true, op(syscall.EADDRNOTAVAIL): true,
		op(syscall.ECONNREFUSED): false, op(syscall.EHOSTUNREACH): false, op(syscall.ETIMEDOUT): false,
		context.Canceled: true, describe(context.DeadlineExceeded, time.Second): false,
	} {
		if got := Inconclusive(err); got != want {
			t.Errorf("%v: inconclusive is %t, want %t", err, got, want)
		}
	}
}

func TestUnknownKind(t *testing.T) {
	err := Network{}.Probe(t.Context(), health.Target{Check: service.HealthCheck{Kind: "smoke"}})
	if !Inconclusive(err) {
		t.Errorf("error %v is held against the endpoint", err)
	}
}

// ill answers health checks with words of its own.
type ill struct {
	grpc_health_v1.UnimplementedHealthServer
	says error
}

func (i ill) Check(context.Context, *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	return nil, i.says
}

// TestReasonsAreOneShortPrintableLine: whatever an endpoint says is wrong with it,
// what people get to see of it can neither drive a terminal nor fill it.
func TestReasonsAreOneShortPrintableLine(t *testing.T) {
	for name, tt := range map[string]struct{ says, want string }{
		"plain words":        {"the database is away: größer als 3 s", "Unknown: the database is away: größer als 3 s"},
		"terminal sequences": {"\x1b[2J\x1b]0;title\x07all is well\r\nshop/web 10.0.0.1:80", "Unknown:  [2J ]0;title all is well  shop/web 10.0.0.1:80"},
		"right to left":      {"a\u202eb", "Unknown: a b"},
		"long words":         {strings.Repeat("ä", 1000), "Unknown: " + strings.Repeat("ä", 75) + "…"},
		"too much":           {strings.Repeat("a", 1<<20), "Internal: stream terminated by RST_STREAM with error code: INTERNAL_ERROR"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			srv := grpc.NewServer()
			grpc_health_v1.RegisterHealthServer(srv, ill{says: status.Error(codes.Unknown, tt.says)})
			go srv.Serve(l)
			defer srv.Stop()
			check(t, l.Addr().(*net.TCPAddr).AddrPort(), service.HealthCheck{Kind: service.CheckGRPC, Timeout: long}, tt.want)
		})
	}
	header := listenTCP(t, "127.0.0.1", answering("HTTP/1.1 200 OK\r\n\x1b[2J: \x07\r\n\r\n"))
	err := Network{}.Probe(t.Context(), health.Target{Address: header, Check: service.HealthCheck{Kind: service.CheckHTTP, Timeout: long}})
	if err == nil || strings.ContainsFunc(err.Error(), unicode.IsControl) {
		t.Errorf("a header of control characters: %q", err)
	}
}
