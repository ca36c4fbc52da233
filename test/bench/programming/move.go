package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// moves measures what it takes to recall one service from the kernel and to
// offload it again, on a user's word: until connections go the new way, which the
// endpoint sees by the port they come from, and kproxy's own time for the pass
// that did it. No rule may be written for it.
func (r *rig) moves(ctx context.Context, p *proxy) error {
	if p.kind != kproxy || !p.kernel() {
		return nil
	}
	first, err := r.passes(ctx)
	if err != nil {
		return err
	}
	var own, packets [2][]float64
	for n := range 2 * ((r.options.changes + 1) / 2) {
		to := n % 2 // 0 recalls, 1 offloads
		was, err := r.passes(ctx)
		if err != nil {
			return err
		}
		took, err := r.pin(ctx, p, []service.Preference{service.PreferUserspace, service.PreferKernel}[to])
		if err != nil {
			return err
		}
		packets[to] = append(packets[to], ms(took))
		is, err := r.passes(ctx)
		if err != nil {
			return err
		}
		if is.count > was.count {
			own[to] = append(own[to], 1000*(is.seconds-was.seconds)/(is.count-was.count))
		}
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
	for to, figures := range [2][2]figure{{figRecallOwn, figRecall}, {figOffloadOwn, figOffload}} {
		if len(own[to]) > 0 {
			r.findings.add(p.subject, figures[0], median(own[to]))
		}
		r.findings.add(p.subject, figures[1], median(packets[to]))
	}
	last, err := r.passes(ctx)
	if err == nil && last.writes != first.writes {
		err = fmt.Errorf("rules were written %d times, for which there was no reason", int(last.writes-first.writes))
	}
	_, unpinned := r.pin(ctx, p, service.PreferAuto)
	return errors.Join(err, unpinned)
}

// pin asks for a data plane of a service, and returns how long it took until
// connections go there.
func (r *rig) pin(ctx context.Context, p *proxy, want service.Preference) (time.Duration, error) {
	i := r.movable(0)
	began := time.Now()
	_, err := web.NewClient(p.socket()).Pin(ctx, web.PinRequest{Namespace: namespace, Name: serviceName(i), Preference: want})
	if err != nil {
		return 0, err
	}
	var at time.Time
	err = r.atClient(func() error {
		at, err = follow(ctx, address(i), func(a answer) bool { return a.userspace == (want == service.PreferUserspace) })
		return err
	})
	return at.Sub(began), err
}

// passes are what kproxy says of its own work so far.
type passes struct {
	count, seconds float64 // of the loop that decides and moves services
	writes         float64 // changes of rules
}

// passes reads kproxy's metrics.
func (r *rig) passes(ctx context.Context) (out passes, err error) {
	text, err := r.get(ctx, "/metrics")
	if err != nil {
		return out, err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), `{ip_family="IPv4"} `)
		var into *float64
		switch name {
		case "kubeproxy_sync_proxy_rules_duration_seconds_count":
			into = &out.count
		case "kubeproxy_sync_proxy_rules_duration_seconds_sum":
			into = &out.seconds
		case "kubeproxy_sync_full_proxy_rules_duration_seconds_count", "kubeproxy_sync_partial_proxy_rules_duration_seconds_count":
			into = &out.writes
		default:
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return out, fmt.Errorf("read metric %s: %w", name, err)
		}
		*into += v
	}
	return out, nil
}

// get asks kproxy's server on the node's loopback.
func (r *rig) get(ctx context.Context, path string) ([]byte, error) {
	client := http.Client{Transport: &http.Transport{DialContext: r.net.Node.Dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10249"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask kproxy: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("ask kproxy for %s: %s: %s", path, resp.Status, text)
	}
	return text, err
}
