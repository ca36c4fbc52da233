package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// Tracer follows packets. A Source that is one has its traces served; see Trace
// of kproxy.dev/kproxy/trace.
type Tracer interface {
	Trace(ctx context.Context, req trace.Request) (trace.Result, error)
}

// serveTraces answers GET requests for traces at path, if src makes any. Only
// those of the control socket may probe: what the API serves only reads.
func serveTraces(mux *http.ServeMux, path string, src Source, mayProbe bool) {
	t, ok := src.(Tracer)
	if !ok {
		return
	}
	slots := newSlots(tracesAtOnce, tracesOfClient)
	if mayProbe {
		slots = newSlots(tracesAtOnce, tracesAtOnce) // all are one client at the control socket
	}
	mux.HandleFunc(path, answer(func(w http.ResponseWriter, r *http.Request) (any, error) {
		req, err := parseTrace(r.URL.Query())
		if err == nil && !mayProbe && (req.Probe || req.Netns != "" || req.Pod != "") {
			err = errors.New("a probe sends a packet, and a namespace is entered; this address only reads: use kproxy trace")
		}
		if err != nil {
			return nil, httpError{http.StatusBadRequest, err.Error()}
		}
		ctx, cancel := context.WithTimeout(r.Context(), trace.Timeout)
		defer cancel()
		// Reading the rules may take longer than answers usually do.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(trace.Timeout + writeTimeout))
		release := slots.take(ctx, clientOf(r.RemoteAddr))
		if release == nil {
			return nil, errors.New("other traces are under way; try again in a moment")
		}
		defer release()
		res, err := t.Trace(ctx, req)
		if errors.Is(err, trace.ErrClient) {
			return nil, httpError{http.StatusBadRequest, err.Error()}
		}
		if err != nil {
			return nil, fmt.Errorf("trace: %w", err)
		}
		return res, nil
	}))
}

// parseTrace reads a request for a trace:
// ?address=IP:PORT&protocol=tcp&from=IP&netns=PATH&pod=NAME&probe=true&steps=all.
func parseTrace(q url.Values) (req trace.Request, err error) {
	if req.Address, err = netip.ParseAddrPort(q.Get("address")); err != nil {
		return req, fmt.Errorf("address %q isn't IP:PORT: %w", q.Get("address"), err)
	}
	req.Protocol = service.TCP
	if p := q.Get("protocol"); p != "" {
		if req.Protocol, err = service.ParseProtocol(p); err != nil {
			return req, fmt.Errorf("protocol %q isn't tcp or udp", p)
		}
	}
	if from := q.Get("from"); from == "client" {
		req.AnyClient = true
	} else if from != "" {
		if req.From, err = netip.ParseAddr(from); err != nil {
			return req, fmt.Errorf("from %q isn't an IP address: %w", from, err)
		}
	}
	req.Probe, req.Netns, req.Pod, req.Every = q.Get("probe") == "true", q.Get("netns"), q.Get("pod"), q.Get("steps") == "all"
	return req, req.Check()
}

// Trace asks the running kproxy to follow a packet. It may take as long as
// [trace.Timeout].
func (c *Client) Trace(ctx context.Context, req trace.Request) (trace.Result, error) {
	q := url.Values{"address": {req.Address.String()}, "protocol": {req.Protocol.String()}}
	if req.From.IsValid() {
		q.Set("from", req.From.String())
	}
	if req.Every {
		q.Set("steps", "all")
	}
	if req.Probe {
		q.Set("probe", "true")
	}
	for name, value := range map[string]string{"netns": req.Netns, "pod": req.Pod} {
		if value != "" {
			q.Set(name, value)
		}
	}
	var res trace.Result
	err := c.call(ctx, trace.Timeout+writeTimeout, http.MethodGet, "/trace?"+q.Encode(), nil, &res)
	return res, err
}

// Answers reports whether the kproxy at the socket answers within d, whatever it
// says: nil if it does.
func (c *Client) Answers(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	if _, err := c.ask(ctx, http.MethodHead, "/", nil); !errors.Is(err, ErrUnknown) {
		return err
	}
	return nil // there is nothing at /
}
