package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// maxGRPC bounds, in bytes, an answer, which is an enum, and its header, which
// holds the error's text.
const maxGRPC = 8 << 10

// grpc is up when grpc.health.v1.Health/Check says that name is SERVING; an
// empty name asks for the whole server. Each probe makes a connection of its
// own: one that was open would tell nothing about the next client.
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
