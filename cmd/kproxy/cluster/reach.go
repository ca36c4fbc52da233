package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"

	"kproxy.dev/kproxy/web"
)

// apiPort is where kproxy serves what only reads, on the node's loopback: kube-proxy's port of metrics.
const apiPort = 10249

// Client returns a client for the kproxy of a node. It can only read.
func (c *Cluster) Client(n Node) *web.Client {
	return web.NewRemoteClient(func(ctx context.Context) (net.Conn, error) { return c.Dial(ctx, n) })
}

// subresource is the URL of exec or portforward of a pod.
func (c *Cluster) subresource(pod, name string, options *core.PodExecOptions) *url.URL {
	r := c.core.RESTClient().Post().Namespace(c.podNamespace).Resource("pods").Name(pod).SubResource(name)
	if options != nil {
		r.VersionedParams(options, scheme.ParameterCodec)
	}
	return r.URL()
}

// upgradeFails reports whether a server, or a proxy before it, doesn't know the kind of connection that was asked for
// first, so that the other one is worth a try.
func upgradeFails(err error) bool {
	return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
}

// Dial connects to the address on a node's loopback where its kproxy serves what only reads. It doesn't end with ctx.
func (c *Cluster) Dial(ctx context.Context, n Node) (net.Conn, error) {
	to := c.subresource(n.Pod, "portforward", nil)
	transport, upgrader, err := spdy.RoundTripperFor(c.rest)
	if err != nil {
		return nil, err
	}
	tunnel, err := portforward.NewSPDYOverWebsocketDialerForStreaming(to, c.rest)
	if err != nil {
		return nil, err
	}
	older := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, to)
	conn, _, err := portforward.NewFallbackDialerForStreaming(tunnel, older, upgradeFails).Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, fmt.Errorf("forward a port to pod %s: %w", n.Pod, err)
	}
	if ctx.Err() != nil { // it came too late
		conn.Close()
		return nil, ctx.Err()
	}
	return streamTo(conn)
}

// streamTo opens the two streams of a forwarded connection (k8s.io/client-go/tools/portforward has the protocol, but only
// behind a listener).
func streamTo(conn httpstream.Connection) (net.Conn, error) {
	headers := http.Header{core.PortHeader: {strconv.Itoa(apiPort)}, core.PortForwardRequestIDHeader: {"0"}}
	open := func(kind string) (httpstream.Stream, error) {
		headers.Set(core.StreamType, kind)
		return conn.CreateStream(headers)
	}
	failures, err := open(core.StreamTypeError)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("forward a port: %w", err)
	}
	failures.Close() // for writing
	data, err := open(core.StreamTypeData)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("forward a port: %w", err)
	}
	f := &forwarded{Stream: data, conn: conn, failure: make(chan error, 1)}
	go func() {
		text, err := io.ReadAll(failures)
		if len(text) > 0 {
			err = fmt.Errorf("forward a port: %s", bytes.TrimSpace(text))
		}
		f.failure <- err
	}()
	return f, nil
}

// forwarded is a forwarded connection. It has no deadlines: closing it ends what waits.
type forwarded struct {
	httpstream.Stream
	conn    httpstream.Connection
	failure chan error // of the far end, or nil once it has ended
}

// Read says why the far end failed, where it does.
func (f *forwarded) Read(b []byte) (int, error) {
	n, err := f.Stream.Read(b)
	if n == 0 && errors.Is(err, io.EOF) {
		select {
		case failure := <-f.failure:
			f.failure <- failure
			if failure != nil {
				err = failure
			}
		case <-time.After(time.Second): // the reason comes on its own stream, with the end of this one
		}
	}
	return n, err
}

func (f *forwarded) Close() error                     { return f.conn.Close() }
func (f *forwarded) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (f *forwarded) RemoteAddr() net.Addr             { return &net.TCPAddr{Port: apiPort} }
func (f *forwarded) SetDeadline(time.Time) error      { return nil }
func (f *forwarded) SetReadDeadline(time.Time) error  { return nil }
func (f *forwarded) SetWriteDeadline(time.Time) error { return nil }

// outputAtMost bounds what a command may print.
const outputAtMost = 64 << 20

// Exec executes a kproxy command in a node's pod and returns what it printed. A command that fails is an [*ExitError].
func (c *Cluster) Exec(ctx context.Context, n Node, args ...string) (string, error) {
	to := c.subresource(n.Pod, "exec", &core.PodExecOptions{Container: container, Command: append([]string{"kproxy"}, args...), Stdout: true, Stderr: true})
	socket, err := remotecommand.NewWebSocketExecutor(c.rest, http.MethodGet, to.String())
	if err != nil {
		return "", err
	}
	older, err := remotecommand.NewSPDYExecutor(c.rest, http.MethodPost, to)
	if err != nil {
		return "", err
	}
	executor, err := remotecommand.NewFallbackExecutor(socket, older, upgradeFails)
	if err != nil {
		return "", err
	}
	var stdout, stderr bounded
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr})
	if err == nil && (stdout.over() || stderr.over()) { // which client-go only logs
		err = errTooLong
	}
	if exit, ok := errors.AsType[exec.CodeExitError](err); ok {
		err = exitError(exit.Code, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), err
}

// exitError is a command's that printed a message and exited with a status.
func exitError(status int, message string) error {
	if status == 2 && strings.Contains(message, "there is no ") && strings.Contains(message, "--help)") {
		return fmt.Errorf("%w: %s", web.ErrUnknown, message) // its command line's words for a command or flag that it doesn't have
	}
	return &ExitError{Status: status, Message: strings.TrimPrefix(message, "kproxy: ")}
}

// ExitError is a command on a node that failed.
type ExitError struct {
	Status  int
	Message string // what it printed of that
}

func (e *ExitError) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("exit status %d", e.Status)
	}
	return e.Message
}

var errTooLong = fmt.Errorf("the answer is longer than %d bytes", outputAtMost)

// bounded keeps the beginning of what is written to it. What reads it may come while it is
// still written to, by a connection whose end isn't waited for.
type bounded struct {
	mu   sync.Mutex
	text strings.Builder
	cut  bool
}

func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cut = b.cut || b.text.Len()+len(p) > outputAtMost; b.cut {
		return 0, errTooLong
	}
	return b.text.Write(p)
}

func (b *bounded) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func (b *bounded) over() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cut
}
