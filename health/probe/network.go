package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Prober makes one probe. It returns nil if the endpoint is up, health.ErrSilent
// if it needn't answer and didn't, and otherwise what is wrong with it, in words
// that don't change from probe to probe. It must return soon after ctx ends.
type Prober interface {
	Probe(ctx context.Context, t health.Target) error
}

// Network probes over the network. The zero value is ready, and it is safe
// for concurrent use.
type Network struct {
	// Mark is the SO_MARK of the probes' sockets, which keeps probes out of
	// the redirection of clients; 0 sets none. It takes CAP_NET_ADMIN.
	Mark uint32
	// FIN has a probe's connection closed by FIN instead of RST, which no server takes for an error. Its port is in TIME_WAIT for a minute then,
	// so it is for probes that are few.
	FIN bool
}

// Probe makes the probe that t.Check asks for; t.Check.Port, if there is one,
// takes the place of the endpoint's.
func (n Network) Probe(ctx context.Context, t health.Target) error {
	addr := t.Address
	if t.Check.Port != 0 {
		addr = netip.AddrPortFrom(addr.Addr(), t.Check.Port)
	}
	var err error
	switch t.Check.Kind {
	case service.CheckTCP:
		err = n.tcp(ctx, addr)
	case service.CheckHTTP:
		err = n.http(ctx, addr, t.Check.Path)
	case service.CheckUDP:
		err = n.udp(ctx, addr)
	case service.CheckGRPC:
		err = n.grpc(ctx, addr, t.Check.Path)
	default:
		return &localError{fmt.Errorf("health check %q is not one of tcp, http, udp, grpc", t.Check.Kind)}
	}
	return clean(describe(err, t.Check.Timeout))
}

// tcp is up when a connection is accepted, whatever happens to it then. That
// includes one that is reset before this host has looked at it: a refused
// handshake would be ECONNREFUSED.
func (n Network) tcp(ctx context.Context, addr netip.AddrPort) error {
	c, err := n.dialTCP(ctx, addr)
	if errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	if err != nil {
		return err
	}
	return c.Close()
}

// dialTCP connects, with SO_LINGER 0 unless n.FIN: closing the connection sends a RST. A
// FIN would leave a port in TIME_WAIT for a minute, 30 for every endpoint
// that is probed every 2s.
func (n Network) dialTCP(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	d := n.dialer()
	c, err := d.DialTCP(ctx, "tcp", netip.AddrPort{}, addr)
	if err != nil {
		return nil, err
	}
	if n.FIN {
		return c, nil
	}
	if err := c.SetLinger(0); err != nil {
		c.Close()
		return nil, &localError{err}
	}
	return c, nil
}

func (n Network) dialer() *net.Dialer {
	return &net.Dialer{KeepAlive: -1, Control: n.SetMark}
}

// SetMark gives a probe's socket its mark; it is for [net.Dialer].
func (n Network) SetMark(_, _ string, c syscall.RawConn) error {
	if n.Mark == 0 {
		return nil
	}
	var set error
	if err := c.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(n.Mark))
	}); err != nil {
		return &localError{err}
	}
	if set != nil {
		return &localError{fmt.Errorf("set mark %#x on a probe's socket: %w", n.Mark, set)}
	}
	return nil
}

// bindContext makes reads and writes on c end with ctx; call stop afterwards.
func bindContext(ctx context.Context, c net.Conn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
}

// udp sends an empty datagram, which is a request in no protocol. The endpoint is down when ICMP says that the port, host or network
// is unreachable, and up when a datagram of any content comes in return.
// Silence until the time-out is health.ErrSilent: see the package comment.
//
// Each probe has a socket, and so a source port, of its own: what a firewall
// or a server remembers of one flow doesn't decide about all probes.
func (n Network) udp(ctx context.Context, addr netip.AddrPort) error {
	c, err := n.dialer().DialUDP(ctx, "udp", netip.AddrPort{}, addr)
	if err != nil {
		return late(err)
	}
	defer c.Close()
	defer bindContext(ctx, c)()
	// Write doesn't send an empty datagram, WriteMsgUDP does.
	if _, _, err := c.WriteMsgUDPAddrPort(nil, nil, netip.AddrPort{}); err != nil {
		return late(err)
	}
	var b [1]byte
	_, _, _, _, err = c.ReadMsgUDPAddrPort(b[:], nil)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return context.Canceled
	case errors.Is(err, os.ErrDeadlineExceeded):
		return health.ErrSilent
	case errors.Is(err, syscall.ECONNREFUSED):
		return &failure{"ICMP port unreachable", err}
	}
	return err
}

// late returns err, of what happens before a datagram is sent, so that a time-out says
// nothing about the endpoint: this host had no time for the probe, and silence would have been fine.
func late(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return &localError{fmt.Errorf("send a datagram in time: %w", err)}
	}
	return err
}

const (
	// maxHTTPHeader bounds what a probe reads of an answer's header, and of
	// its body.
	maxHTTPHeader = 64 << 10
	maxHTTPBody   = 16 << 10
	// maxInformational bounds the 1xx answers before the final one.
	maxInformational = 8
)

// http is up when a GET is answered with a status from 200 to 399, which is
// kubelet's rule. A redirect is an answer; it isn't followed. The Host header
// is the endpoint's address. It works on the connection itself: an
// http.Transport keeps two goroutines and a pool for connections that are
// never used again.
func (n Network) http(ctx context.Context, addr netip.AddrPort, path string) error {
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+path, nil)
	if err != nil {
		return fmt.Errorf("make a request for path %q: %w", path, err)
	}
	req.Close = true
	req.Header.Set("User-Agent", "kproxy-health")
	req.Header.Set("Accept", "*/*")
	c, err := n.dialTCP(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	defer bindContext(ctx, c)()
	if err := req.Write(c); err != nil {
		return err
	}
	limit := &io.LimitedReader{R: c, N: maxHTTPHeader}
	status, err := finalStatus(bufio.NewReader(limit), req, limit)
	if err != nil {
		return err
	}
	if status < 200 || status > 399 {
		return fmt.Errorf("HTTP status %d", status)
	}
	return nil
}

// finalStatus reads answers until one is final, and as much of its body as
// lets a server finish its write before the connection is reset.
func finalStatus(r *bufio.Reader, req *http.Request, limit *io.LimitedReader) (int, error) {
	for range maxInformational {
		resp, err := http.ReadResponse(r, req)
		if err != nil && limit.N == 0 {
			return 0, fmt.Errorf("header longer than %d bytes", maxHTTPHeader)
		}
		if err != nil {
			return 0, err
		}
		if resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols {
			continue
		}
		limit.N = maxHTTPBody
		if resp.ContentLength > 0 && resp.ContentLength <= maxHTTPBody {
			io.Copy(io.Discard, resp.Body) // the status has decided
		}
		return resp.StatusCode, nil
	}
	return 0, fmt.Errorf("more than %d informational answers", maxInformational)
}

// maxGRPC bounds, in bytes, an answer, which is an enum, and its header, which
// holds the error's text.
const maxGRPC = 8 << 10

// grpc is up when grpc.health.v1.Health/Check says that name is SERVING; an
// empty name asks for the whole server. Each probe makes a connection of its
// own: an open one would prove nothing for the next client.
func (n Network) grpc(ctx context.Context, addr netip.AddrPort, name string) error {
	var dialed atomic.Pointer[error]
	conn, err := grpc.NewClient("passthrough:///"+addr.String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(),
		grpc.WithUserAgent("kproxy-health"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxGRPC)), grpc.WithMaxHeaderListSize(maxGRPC),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := n.dialTCP(ctx, addr)
			if err != nil {
				dialed.Store(&err)
				return nil, err
			}
			return c, nil
		}))
	if err != nil {
		return &localError{fmt.Errorf("make a gRPC client: %w", err)}
	}
	defer conn.Close()
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: name})
	switch {
	case err == nil && resp.Status == grpc_health_v1.HealthCheckResponse_SERVING:
		return nil
	case err == nil:
		return fmt.Errorf("service %q is %s", name, resp.Status)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	if failed := dialed.Load(); failed != nil && !errors.Is(*failed, context.Canceled) && !errors.Is(*failed, syscall.ECONNRESET) {
		return *failed
	}
	return describeStatus(status.Convert(err), name)
}

// describeStatus words what gRPC says without the parts that change from
// probe to probe: gRPC's own messages hold the probe's port.
func describeStatus(s *status.Status, name string) error {
	switch s.Code() {
	case codes.Unavailable:
		return errors.New("connection lost, or the server doesn't speak gRPC")
	case codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case codes.NotFound:
		return fmt.Errorf("service %q is not known to the server", name)
	case codes.Unimplemented:
		return errors.New("the server doesn't implement grpc.health.v1.Health")
	}
	return fmt.Errorf("%s: %s", s.Code(), s.Message())
}
