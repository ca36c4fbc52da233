package web

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"kproxy.dev/kproxy/plan"
)

// ErrNotRunning is returned by a Client at whose socket no kproxy listens.
var ErrNotRunning = errors.New("kproxy isn't running here")

// ErrNoAnswer is returned by a Client whose kproxy hangs up, or takes too long.
var ErrNoAnswer = errors.New("kproxy doesn't answer")

// ErrUnknown is about a question that the asked kproxy doesn't know.
var ErrUnknown = errors.New("the kproxy there is older and doesn't know this")

// Client talks to the kproxy that runs on this host by its control socket. It
// is safe for concurrent use.
type Client struct {
	socket string // empty for one elsewhere
	url    string // before the path
	http   *http.Client
}

// NewClient returns a client for the control socket at path. It connects with
// each call.
func NewClient(path string) *Client {
	var d net.Dialer
	return newClient(path, "http://kproxy", func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "unix", path) })
}

// NewRemoteClient returns a client for the API of a kproxy on another host, which only reads. dial
// connects to it, once for each call. Answers come compressed: the API server carries those of all nodes.
func NewRemoteClient(dial func(context.Context) (net.Conn, error)) *Client {
	c := newClient("", "http://localhost/api/v1", dial)
	c.http.Transport.(*http.Transport).DisableCompression = false
	return c
}

func newClient(socket, url string, dial func(context.Context) (net.Conn, error)) *Client {
	return &Client{socket: socket, url: url, http: &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives:  true,
			DisableCompression: true,
			DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		},
	}}
}

// callTimeout bounds a call, from connecting to the end of the answer.
const callTimeout = 30 * time.Second

// Status returns what every service does now, and why.
func (c *Client) Status(ctx context.Context) (plan.Status, error) {
	var s plan.Status
	err := c.call(ctx, callTimeout, http.MethodGet, "/status", nil, &s)
	return s, err
}

// EachService is Status with f called for each service port in place of a list of them: so an answer about thousands
// never is in memory as a whole.
func (c *Client) EachService(ctx context.Context, f func(*plan.ServiceStatus)) (plan.Status, error) {
	var s plan.Status
	err := each(ctx, c, "/status", "services", &s, f)
	return s, err
}

// EachConnection calls f for each live connection of all services.
func (c *Client) EachConnection(ctx context.Context, f func(*plan.ConnectionStatus)) error {
	return each(ctx, c, "/connections", "connections", &struct{}{}, f)
}

// each asks for an object, calls f for each element of its list that has the given name, and reads the rest into a value. The
// caller bounds the time: it may be f that takes it.
func each[T any](ctx context.Context, c *Client, path, list string, into any, f func(*T)) error {
	return c.read(ctx, http.MethodGet, path, nil, func(answer io.Reader) error { return eachOf(json.NewDecoder(answer), list, into, f) })
}

func eachOf[T any](d *json.Decoder, list string, into any, f func(*T)) error {
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return cmp.Or(err, errors.New("it is no object"))
	}
	rest := map[string]json.RawMessage{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return err
		}
		if name != list {
			var v json.RawMessage
			if err := d.Decode(&v); err != nil {
				return err
			}
			rest[fmt.Sprint(name)] = v
			continue
		}
		switch t, err := d.Token(); {
		case err != nil:
			return err
		case t == nil:
			continue // null
		case t != json.Delim('['):
			return fmt.Errorf("%s is no list", list)
		}
		for d.More() {
			var v T
			if err := d.Decode(&v); err != nil {
				return err
			}
			f(&v)
		}
		if _, err := d.Token(); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	whole, err := json.Marshal(rest)
	if err != nil {
		return err
	}
	return json.Unmarshal(whole, into)
}

// NotReady says why new connections to some service aren't carried, empty if all are; here says whether it is this container's
// kproxy that answers, which shares its PID namespace, and not one that ran before it or has taken over from it.
func (c *Client) NotReady(ctx context.Context) (why string, here bool, err error) {
	conn, err := net.Dial("unix", c.socket)
	if err != nil {
		return "", false, c.explain(err)
	}
	defer conn.Close()
	peer, err := peerOf(conn.(*net.UnixConn))
	if err != nil {
		return "", false, err
	}
	var r readiness
	err = c.call(ctx, callTimeout, http.MethodGet, "/ready", nil, &r)
	return r.NotReady, peer.Pid != 0, err // unix(7): 0 is a process of another PID namespace
}

// Connections lists live connections; of one service NAMESPACE/NAME[:PORT], or
// of all if it is empty.
func (c *Client) Connections(ctx context.Context, service string) ([]plan.ConnectionStatus, error) {
	path := "/connections"
	if service != "" {
		path += "?service=" + url.QueryEscape(service)
	}
	var list connectionList
	err := c.call(ctx, callTimeout, http.MethodGet, path, nil, &list)
	return list.Connections, err
}

// Timeline returns up to n events, 1 to 2000, newest first: those of
// NAMESPACE/NAME[:PORT], or all if it is empty.
func (c *Client) Timeline(ctx context.Context, service string, n int) ([]plan.Event, error) {
	var list eventList
	err := c.call(ctx, callTimeout, http.MethodGet, "/timeline?"+url.Values{"service": {service}, "limit": {strconv.Itoa(n)}}.Encode(), nil, &list)
	return list.Events, err
}

// Text returns what kproxy answers at a path of its control socket, as it is: /status, /metrics, /configz or /log.
func (c *Client) Text(ctx context.Context, path string) (text []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = c.read(ctx, http.MethodGet, path, nil, func(answer io.Reader) (err error) {
		text, err = io.ReadAll(answer)
		return err
	})
	return text, err
}

// Pin keeps a service in a data plane and returns what was pinned.
func (c *Client) Pin(ctx context.Context, req PinRequest) (PinResult, error) {
	var res PinResult
	body, err := json.Marshal(req)
	if err != nil {
		return res, fmt.Errorf("encode pin request: %w", err)
	}
	err = c.call(ctx, callTimeout, http.MethodPost, "/pin", body, &res)
	return res, err
}

// Drain drains kproxy's node, or ends that.
func (c *Client) Drain(ctx context.Context, on bool) error {
	return c.call(ctx, callTimeout, http.MethodPost, "/drain?on="+strconv.FormatBool(on), nil, &struct{}{})
}

// answerAtMost bounds an answer, in bytes: that of another node's kproxy is not to be trusted.
const answerAtMost = 256 << 20

// call reads the answer to a request into a value.
func (c *Client) call(ctx context.Context, timeout time.Duration, method, path string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.read(ctx, method, path, body, func(answer io.Reader) error { return json.NewDecoder(answer).Decode(into) })
}

// read has f read the answer to a request.
func (c *Client) read(ctx context.Context, method, path string, body []byte, f func(io.Reader) error) error {
	resp, err := c.ask(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := f(io.LimitReader(resp.Body, answerAtMost)); err != nil {
		return fmt.Errorf("read kproxy's answer: %w", err)
	}
	return nil
}

// ask returns the answer to a request, unless that is a refusal. It asks once more where the kproxy on this host hangs up without an answer: it has been taken over from or has crashed, and
// another one serves, or one of the two processes was starved for longer than [headerTimeout]. It does no harm to ask for
// anything twice.
func (c *Client) ask(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	for again := false; ; again = true {
		req, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(body))
		if err != nil {
			return nil, fmt.Errorf("ask kproxy: %w", err)
		}
		resp, err := c.http.Do(req)
		if err == nil && resp.StatusCode == http.StatusOK {
			return resp, nil
		} else if err == nil {
			defer resp.Body.Close()
			return nil, refusal(resp)
		}
		if err = c.explain(err); again || !errors.Is(err, ErrNoAnswer) || ctx.Err() != nil {
			return nil, err
		}
	}
}

// explain says what a failed connection means and what to do about it.
func (c *Client) explain(err error) error {
	var request *url.Error
	switch {
	case c.socket == "" && errors.As(err, &request):
		return request.Err // its URL is made up
	case c.socket == "":
		return err
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: no control socket at %s; start it with kproxy run, or pass --socket", ErrNotRunning, c.socket)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: no process listens on the control socket %s: kproxy has died; start it with kproxy run, or pass --socket", ErrNotRunning, c.socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the control socket %s may be used by root only; run this command as root: %w", c.socket, fs.ErrPermission)
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("ask kproxy at %s: %w", c.socket, err)
	}
	return fmt.Errorf("%w at %s: %w", ErrNoAnswer, c.socket, err)
}

// refusal is the error in an answer that isn't 200.
func refusal(resp *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("read kproxy's answer: %w", err)
	}
	var e errorBody
	if json.Unmarshal(b, &e) == nil && e.Error != "" {
		return errors.New(e.Error)
	}
	if resp.StatusCode == http.StatusNotFound {
		return ErrUnknown
	}
	return fmt.Errorf("ask kproxy: HTTP status %s", resp.Status)
}

// maxEventLine is far more than a line of an event needs.
const maxEventLine = 1 << 20

// Events calls f for everything that happens from when it calls opened, until ctx ends or
// kproxy does.
func (c *Client) Events(ctx context.Context, opened func() error, f func(plan.Event)) error {
	resp, err := c.ask(ctx, http.MethodGet, "/events", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := opened(); err != nil {
		return err
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEventLine)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var e plan.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("read kproxy's event: %w", err)
		}
		f(e)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read kproxy's events: %w", err)
	}
	return nil
}
