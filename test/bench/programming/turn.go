package programming

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// turn takes a subject through the cases. A case that fails is reported and the
// next one goes on; what is returned is about the rig.
func (r *rig) turn(ctx context.Context, s subject) error {
	switch {
	case s.kind == noProxy:
		return r.withoutProxy(ctx, s)
	case s.kind == haProxy && r.wants(caseDead):
		return r.haproxy(ctx, s)
	case s.kind == haProxy:
		return nil
	}
	began := time.Now()
	p, stop, err := r.start(s)
	if err != nil {
		return err
	}
	if err := r.try(ctx, s, caseStart, func(ctx context.Context) error { return r.coldStart(ctx, p, began) }); err == nil {
		r.cases(ctx, p)
	}
	return stop()
}

// withoutProxy measures connects only.
func (r *rig) withoutProxy(ctx context.Context, s subject) error {
	if !r.wants(caseConnect) && !r.wants(caseForward) {
		return nil
	}
	if s.mode == tracking {
		err := command(ctx, r.net.Node, "nft", "add table ip bench; add chain ip bench nat { type nat hook postrouting priority 100 ; } ; add rule ip bench nat ip saddr 192.0.2.1 masquerade")
		if err != nil {
			return err
		}
	}
	// Both kinds of a proxy's connections are compared with these.
	if r.wants(caseConnect) {
		r.try(ctx, s, caseConnect, func(context.Context) error {
			return errors.Join(r.connectDirect(s, figConnectOther), r.connectDirect(s, figConnectService))
		})
	}
	if r.wants(caseForward) {
		r.try(ctx, s, caseForward, func(ctx context.Context) error { return r.forward(ctx, s, r.net.Backends[0].Addresses[0]) })
	}
	return r.clean(&proxy{subject: s})
}

// cases runs the cases that follow the start.
func (r *rig) cases(ctx context.Context, p *proxy) {
	for _, c := range []struct {
		name string
		does func(context.Context, *proxy) error
	}{
		{caseMemory, r.steadyMemory},
		{caseConnect, r.connects},
		{caseForward, func(ctx context.Context, p *proxy) error {
			return errors.Join(r.forward(ctx, p.subject, load.ServiceAddress), r.calm(ctx, p))
		}},
		{caseChange, r.changes},
		{caseCPU, r.changeCPU},
		{caseCPU, r.scrapeCPU},
		{caseBackToBack, r.backToBack},
		{caseMove, r.moves},
		{caseMemory, r.memoryAfterChanges},
		{caseDead, r.deadEndpoint},
	} {
		if r.wants(c.name) && ctx.Err() == nil {
			r.try(ctx, p.subject, c.name, func(ctx context.Context) error { return c.does(ctx, p) })
		}
	}
}

// wants reports whether a case is to be measured.
func (r *rig) wants(name string) bool {
	return slices.Contains(r.Cases, name) && (name != caseDead || r.world.services == slices.Min(r.Services))
}

// try runs a case within the deadline.
func (r *rig) try(ctx context.Context, s subject, name string, does func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.Deadline)
	defer cancel()
	err := does(ctx)
	if err != nil {
		r.say("%s, %s: %v", s.Name, name, err)
		r.fail(s, name, err)
	}
	return err
}

// atClient runs f in the client's namespace.
func (r *rig) atClient(f func() error) error { return r.net.Client.Do(f) }

// samples are services all over the table, the first and the last among them.
func (w world) samples() []int {
	out := []int{0, w.services - 1}
	for k := 1; k < 7; k++ {
		out = append(out, k*w.services/7)
	}
	return out
}

// askPatience is short: before there are rules, no answer comes.
const askPatience = 20 * time.Millisecond

// coldStart measures from the process's start until every sample has answered,
// and until the log says that the rules are in the kernel; then it connects to
// every service and counts the rules, in case one of the two was wrong.
func (r *rig) coldStart(ctx context.Context, p *proxy, began time.Time) error {
	var answered time.Time
	err := r.atClient(func() error {
		left := r.samples()
		for len(left) > 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("wait until %d of the services answer: %w: %s", len(left), err, end(p.process.Log()))
			}
			if !p.process.Running() {
				return fmt.Errorf("it ended: %s", end(p.process.Log()))
			}
			a, err := ask(address(left[0]), askPatience)
			if err != nil {
				time.Sleep(2 * time.Millisecond)
				continue
			}
			answered, left = a.start, left[1:]
		}
		return nil
	})
	if err != nil {
		return err
	}
	programmed := answered
	if p.kernel() {
		if programmed, err = p.log.await(ctx, p.process, began); err != nil {
			return err
		}
	}
	used, err := p.cpu()
	if err != nil {
		return err
	}
	if r.wants(caseStart) {
		r.add(p.subject, figStartAnswer, answered.Sub(began).Seconds())
		if p.kernel() {
			r.add(p.subject, figStartKernel, programmed.Sub(began).Seconds())
		}
		r.add(p.subject, figStartCPU, used)
	}
	if err := r.calm(ctx, p); err != nil {
		return err
	}
	if used, err = p.cpu(); err != nil {
		return err
	}
	r.add(p.subject, figStartCalm, used)
	if !r.wants(caseStart) {
		return nil
	}
	return r.verifyAll(ctx, p)
}

// verifyAll connects to every service and counts rules.
func (r *rig) verifyAll(ctx context.Context, p *proxy) error {
	var errs []error
	err := r.atClient(func() error {
		for i := range r.world.services {
			if _, err := ask(address(i), time.Second); err != nil {
				errs = append(errs, err)
			}
			if len(errs) > 10 || ctx.Err() != nil {
				break
			}
		}
		return errors.Join(errs...)
	})
	if err != nil || !p.kernel() {
		return err
	}
	n, err := r.ruleCount(ctx, p.subject)
	if want := r.endpointCount(); err == nil && n != want {
		err = fmt.Errorf("rules lead to %d endpoints, of which there are %d", n, want)
	}
	return errors.Join(err, r.calm(ctx, p))
}

// calm waits until the proxy uses next to no time; no longer than some seconds,
// for one that is never idle.
func (r *rig) calm(ctx context.Context, p *proxy) error {
	window, times := 500*time.Millisecond, 30
	if r.Quick {
		window, times = 50*time.Millisecond, 10
	}
	was, err := p.cpu()
	for i, quiet := 0, 0; err == nil && i < times && quiet < 3; i++ {
		if err := lab.Sleep(ctx, window); err != nil {
			return fmt.Errorf("wait until %s is idle: %w", p.Name, err)
		}
		var now float64
		now, err = p.cpu()
		if quiet++; now-was > 0.05*window.Seconds() {
			quiet = 0
		}
		was = now
	}
	return err
}

// connects measures connect to a backend and to services.
func (r *rig) connects(ctx context.Context, p *proxy) error {
	if err := r.connectDirect(p.subject, figConnectOther); err != nil {
		return err
	}
	// A prime step meets services all over the table.
	err := r.connectP50(p.subject, figConnectService, func(i int) netip.AddrPort { return address(i * 7919 % r.world.services) })
	return errors.Join(err, r.calm(ctx, p))
}

// forward measures established traffic to a backend and to a service's address.
func (r *rig) forward(ctx context.Context, s subject, service netip.Addr) error {
	return errors.Join(
		r.loadsTo(ctx, s, r.net.Backends[0].Addresses[0], figForwardTCP, figForwardUDP, figForwardBulk),
		r.loadsTo(ctx, s, service, figServiceTCP, figServiceUDP, figServiceBulk))
}

func (r *rig) loadsTo(ctx context.Context, s subject, to netip.Addr, tcp, udp, bulk figure) error {
	for _, l := range []struct {
		of    figure
		kind  load.Kind
		conns int
		cost  func(*load.Outcome) float64
	}{
		{tcp, load.Exchange, 64, perExchange}, {udp, load.Datagram, 64, perExchange},
		{bulk, load.Bulk, 1, func(o *load.Outcome) float64 { return 1e3 * o.Seconds / float64(o.Bytes) * 1e9 }},
	} {
		var costs []float64
		for range r.batches() {
			out, err := r.loads.Load(ctx, load.Load{
				Kind: l.kind, Conns: l.conns, Time: 500 * time.Millisecond, Targets: []netip.AddrPort{netip.AddrPortFrom(to, l.kind.Port())},
			})
			if err == nil && (out.Count == 0 || out.Failed > 0 && !out.Late()) {
				err = fmt.Errorf("%d of %d failed: %s", out.Failed, out.Count+out.Failed, out.Error)
			}
			if err != nil {
				return fmt.Errorf("load %s: %w", to, err)
			}
			costs = append(costs, l.cost(&out))
		}
		r.add(s, l.of, median(costs))
	}
	return nil
}

func perExchange(o *load.Outcome) float64 { return 1e6 * o.Seconds / float64(o.Count) }

func (r *rig) connectDirect(s subject, of figure) error {
	return r.connectP50(s, of, func(int) netip.AddrPort { return r.direct() })
}

// batch is how many connections wait to be accepted: less than a listener's queue
// holds (net.core.somaxconn, 4096).
const batch = 1000

func (r *rig) connectP50(s subject, of figure, target func(i int) netip.AddrPort) error {
	var times []float64
	for n := range r.batches() {
		for _, s := range r.servers {
			s.serving.Lock()
		}
		err := r.atClient(func() error {
			t, err := connectTimes(batch, func(i int) netip.AddrPort { return target(n*batch + i) })
			times = append(times, t...)
			return err
		})
		for _, s := range r.servers {
			s.serving.Unlock()
		}
		if err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond) // until those are accepted and gone
	}
	r.add(s, of, median(times))
	return nil
}

func (r *rig) batches() int {
	if r.Quick {
		return 1
	}
	return 5
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// steadyMemory is measured before anything has changed.
func (r *rig) steadyMemory(_ context.Context, p *proxy) error {
	rss, peak, pss, err := p.memory()
	if err == nil {
		r.add(p.subject, figRSS, rss)
		r.add(p.subject, figPss, pss)
		r.add(p.subject, figPeak, peak)
	}
	return err
}

// memoryAfterChanges is measured after a hundred changes, twenty a second; all of
// the movable ones are back then.
func (r *rig) memoryAfterChanges(ctx context.Context, p *proxy) error {
	changes := 100
	if r.Quick {
		changes = 2 * movables
	}
	for n := range changes {
		// Every movable one goes there and back.
		if err := r.cluster.move(ctx, r.movable(n), (n/movables+1)%sides); err != nil {
			return err
		}
		if err := lab.Sleep(ctx, time.Second/20); err != nil {
			return err
		}
	}
	if err := r.calm(ctx, p); err != nil {
		return err
	}
	rss, _, _, err := p.memory()
	if err == nil {
		r.add(p.subject, figRSSLater, rss)
	}
	return err
}

// spacing is from when a change has been carried out to the next: more than
// kube-proxy's minSyncPeriod, unless it is only about whether the rig works.
func (o *Options) spacing() time.Duration {
	if o.Quick {
		return 100 * time.Millisecond
	}
	return 1300 * time.Millisecond
}

// A case whose changes take long has fewer of them.
const (
	fewChanges = 4
	longCase   = 20 * time.Second
)

// enough reports whether n changes will do, of a case that began then: each there and
// back.
func (o *Options) enough(n int, began time.Time) bool {
	wanted := 2 * ((o.Changes + 1) / 2)
	return n >= wanted || n >= fewChanges && n%2 == 0 && time.Since(began) > longCase
}

// changes measures single changes: from the write until new connections follow.
func (r *rig) changes(ctx context.Context, p *proxy) error {
	var connections, sinceReported, kernel []float64
	for n, start := 0, time.Now(); !r.enough(n, start); n++ {
		i, side := r.movable(n/2), (n+1)%sides
		began := time.Now()
		followed, err := r.moveAndFollow(ctx, i, side)
		if err != nil {
			return err
		}
		connections = append(connections, ms(followed.Sub(began)))
		if reported, ok := r.cluster.reported(i); ok {
			sinceReported = append(sinceReported, max(0, ms(followed.Sub(reported))))
		}
		if p.kernel() {
			written, err := p.log.await(ctx, p.process, began)
			if err != nil {
				return err
			}
			kernel = append(kernel, ms(written.Sub(began)))
		}
		if err := lab.Sleep(ctx, r.spacing()); err != nil {
			return err
		}
	}
	r.add(p.subject, figChange, median(connections))
	if len(sinceReported) > 0 {
		r.add(p.subject, figChangeReported, median(sinceReported))
	}
	if len(kernel) > 0 {
		r.add(p.subject, figChangeKernel, median(kernel))
	}
	return r.calm(ctx, p)
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

// moveAndFollow moves an endpoint and returns when the first connection that
// follows began.
func (r *rig) moveAndFollow(ctx context.Context, i, side int) (time.Time, error) {
	written := make(chan error, 1)
	go func() { written <- r.cluster.move(ctx, i, side) }()
	var followed time.Time
	err := r.atClient(func() (err error) {
		followed, err = follow(ctx, address(i), func(a answer) bool { return a.side == side })
		return err
	})
	if e := <-written; e != nil {
		err = e
	}
	return followed, err
}

// changeCPU measures what changes cost the proxy and its children, without any
// connection meanwhile: all it has used until it is idle again, less what it uses
// when nothing happens.
func (r *rig) changeCPU(ctx context.Context, p *proxy) error {
	if err := r.settle(ctx); err != nil {
		return err
	}
	before, err := r.idleRate(ctx, p)
	if err != nil {
		return err
	}
	was, err := p.cpuTime()
	if err != nil {
		return err
	}
	began, n := time.Now(), 0
	for ; !r.enough(n, began); n++ {
		if err := r.moveQuietly(ctx, p, r.movable(n/2), (n+1)%sides); err != nil {
			return err
		}
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	is, err := p.cpuTime()
	if err != nil {
		return err
	}
	took := time.Since(began).Seconds()
	after, err := r.idleRate(ctx, p)
	if err != nil {
		return err
	}
	// The lesser one: what is left of a change mustn't make changes look cheaper.
	idle := min(before, after)
	used := is.own - was.own + is.children - was.children - idle*took
	r.add(p.subject, figChangeCPU, 1000*max(0, used)/float64(n))
	r.add(p.subject, figChangeChildren, 1000*(is.children-was.children)/float64(n))
	r.add(p.subject, figIdleCPU, 1000*idle)
	return nil
}

// settle waits for what a proxy puts off after a change: kproxy, until connections to endpoints that have left are looked
// for, five seconds at most.
func (r *rig) settle(ctx context.Context) error { return lab.Sleep(ctx, 5*r.spacing()) }

// scrapeCPU measures what Prometheus costs the proxy.
func (r *rig) scrapeCPU(ctx context.Context, p *proxy) error {
	const scrapes = 10
	was, err := p.cpu()
	for range scrapes {
		if err == nil {
			_, err = r.metrics(ctx)
		}
	}
	if err != nil {
		return err
	}
	is, err := p.cpu()
	if err == nil {
		r.add(p.subject, figScrapeCPU, 1000*(is-was)/scrapes)
	}
	return err
}

// moveQuietly moves an endpoint and waits until the proxy has done with it.
func (r *rig) moveQuietly(ctx context.Context, p *proxy, i, side int) error {
	at := time.Now()
	if err := r.cluster.move(ctx, i, side); err != nil {
		return err
	}
	if p.kernel() {
		if _, err := p.log.await(ctx, p.process, at); err != nil {
			return err
		}
	}
	return lab.Sleep(ctx, r.spacing())
}

// idleRate measures how many processors the proxy uses when nothing happens.
func (r *rig) idleRate(ctx context.Context, p *proxy) (float64, error) {
	const looks = 8 // each as long as between changes: together longer than what kproxy does every ten seconds is apart
	was, err := p.cpu()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for range looks {
		if err := lab.Sleep(ctx, r.spacing()); err != nil {
			return 0, err
		}
	}
	is, err := p.cpu()
	return (is - was) / time.Since(began).Seconds(), err
}

// backToBack measures changes of which each follows the one before at once.
func (r *rig) backToBack(ctx context.Context, p *proxy) (err error) {
	// New connections follow a change before the rules do: those of the last one are
	// written before the next case, also where this one fails.
	defer func() { err = errors.Join(err, r.calm(ctx, p)) }()
	began := time.Now()
	n := 0
	for ; !r.enough(n, began); n++ {
		if _, err := r.moveAndFollow(ctx, r.movable(n/2), (n+1)%sides); err != nil {
			return fmt.Errorf("change %d: %w", n+1, err)
		}
	}
	r.add(p.subject, figBackToBack, ms(time.Since(began))/float64(n))
	return nil
}

// moves measures what it takes to recall one service from the kernel and to
// offload it again at a user's request: until connections go the new way, which the
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
	for n := range 2 * ((r.Changes + 1) / 2) {
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
		if err := lab.Sleep(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
	for to, figures := range [2][2]figure{{figRecallOwn, figRecall}, {figOffloadOwn, figOffload}} {
		if len(own[to]) > 0 {
			r.add(p.subject, figures[0], median(own[to]))
		}
		r.add(p.subject, figures[1], median(packets[to]))
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

// passes holds what kproxy's metrics say of its work so far.
type passes struct {
	count, seconds float64 // of the loop that decides and moves services
	writes         float64 // changes of rules
}

// passes reads kproxy's metrics.
func (r *rig) passes(ctx context.Context) (out passes, err error) {
	text, err := r.metrics(ctx)
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

// metrics asks the proxy's server of metrics on the node's loopback, which has one port for all.
func (r *rig) metrics(ctx context.Context) ([]byte, error) {
	return lab.Get(ctx, r.net.Node.HTTPClient(0), "http://127.0.0.1:10249/metrics") // ctx bounds it
}
