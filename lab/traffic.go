package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// TrafficConfig describes a stream of new connections, each for one exchange.
type TrafficConfig struct {
	From    *Namespace
	Local   netip.Addr // the kernel's choice if zero
	Network string     // "tcp" or "udp"
	Target  netip.AddrPort
	// FirstPort is the local port of the first exchange; each one takes the next,
	// so that none meets what the kernel remembers of another. 0 leaves the
	// choice to the kernel.
	FirstPort   uint16
	Reset       bool          // ends TCP connections by resets, which kernels forget sooner
	Rate        float64       // new connections per second
	Count       int           // ends after so many; required, it bounds memory
	Timeout     time.Duration // of one exchange, connect included; 0 means 2s
	Concurrency int           // exchanges at a time; 0 means 64. At the bound, and where the machine is slow, the rate falls.
	OnResult    func(Result)  // called for each, one at a time; may be nil
}

// Result is one exchange.
type Result struct {
	Start   time.Time
	Latency time.Duration // from connect to answer
	Answer  Answer
	Err     error
}

// Traffic is a running stream of connections.
type Traffic struct {
	config TrafficConfig
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex // workers add while others read
	results []Result
}

func (c *TrafficConfig) defaults() error {
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Concurrency == 0 {
		c.Concurrency = 64
	}
	var errs []error
	if c.From == nil {
		errs = append(errs, errors.New("no namespace to send from"))
	}
	if c.Network != "tcp" && c.Network != "udp" {
		errs = append(errs, fmt.Errorf("network %q is neither tcp nor udp", c.Network))
	}
	if c.FirstPort != 0 && int(c.FirstPort)+c.Count > 1<<16 {
		errs = append(errs, fmt.Errorf("%d connections from port %d on are more than there are ports", c.Count, c.FirstPort))
	}
	if c.Rate <= 0 || c.Count <= 0 || c.Concurrency < 0 || c.Timeout < 0 {
		errs = append(errs, fmt.Errorf("rate %g, count %d, concurrency %d and timeout %s must be positive", c.Rate, c.Count, c.Concurrency, c.Timeout))
	}
	return errors.Join(errs...)
}

// StartTraffic starts connections until Count, Stop or the end of ctx.
// Exchanges under way then end by themselves: stopping makes no failures.
func StartTraffic(ctx context.Context, c TrafficConfig) (*Traffic, error) {
	if err := c.defaults(); err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	t := &Traffic{config: c, cancel: cancel, done: make(chan struct{})}
	go t.run(ctx)
	return t, nil
}

func (t *Traffic) run(ctx context.Context) {
	defer close(t.done)
	defer t.cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, t.config.Concurrency)
	interval := time.Duration(float64(time.Second) / t.config.Rate)
	due := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range t.config.Count {
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		wg.Go(func() {
			defer func() { <-slots }()
			t.one(i)
		})
		// What is a little late is made up for. More isn't: a machine that can't keep up would get a burst to catch up with as well.
		due = due.Add(interval)
		if latest := time.Now().Add(-100 * time.Millisecond); due.Before(latest) {
			due = latest
		}
	}
}

func (t *Traffic) one(i int) {
	ctx, cancel := context.WithTimeout(context.Background(), t.config.Timeout)
	defer cancel()
	local := netip.AddrPortFrom(t.config.Local, 0)
	if t.config.FirstPort != 0 {
		local = netip.AddrPortFrom(t.config.Local, t.config.FirstPort+uint16(i))
	}
	r := Result{Start: time.Now()}
	r.Answer, r.Err = t.config.From.askFrom(ctx, local, t.config.Network, t.config.Target, fmt.Sprint(i), t.config.Reset)
	r.Latency = time.Since(r.Start)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.results = append(t.results, r)
	if t.config.OnResult != nil {
		t.config.OnResult(r)
	}
}

// Stop starts no further connections, waits for those under way, and returns
// all results.
func (t *Traffic) Stop() Results {
	t.cancel()
	return t.Wait()
}

// Wait waits until the stream has ended and returns all results.
func (t *Traffic) Wait() Results {
	<-t.done
	return t.Results()
}

// Results returns the results so far, in the order in which they came.
func (t *Traffic) Results() Results {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.results)
}

// Results are the outcomes of many exchanges.
type Results []Result

// Failed returns those that failed.
func (r Results) Failed() Results {
	return slices.DeleteFunc(slices.Clone(r), func(x Result) bool { return x.Err == nil })
}

// Err says what is wrong with a stretch in which all should have gone well, so
// it isn't nil where there was nothing that could.
func (r Results) Err() error {
	switch {
	case len(r) == 0:
		return errors.New("no exchange was made")
	case len(r.Failed()) > 0:
		return errors.New(r.String())
	}
	return nil
}

// Since returns those that started after t.
func (r Results) Since(t time.Time) Results {
	return slices.DeleteFunc(slices.Clone(r), func(x Result) bool { return !x.Start.After(t) })
}

// ByBackend counts the successful ones per backend.
func (r Results) ByBackend() map[string]int {
	out := map[string]int{}
	for _, x := range r {
		if x.Err == nil {
			out[x.Answer.Backend]++
		}
	}
	return out
}

// String says in one line how many there were, and the first failure.
func (r Results) String() string {
	s := fmt.Sprintf("%d exchanges", len(r))
	counts := r.ByBackend()
	for i, name := range slices.Sorted(maps.Keys(counts)) {
		s += fmt.Sprintf("%s%s %d", []string{" (", ", "}[min(i, 1)], name, counts[name])
	}
	if len(counts) > 0 {
		s += ")"
	}
	failed := r.Failed()
	s += fmt.Sprintf(", %d failed", len(failed))
	if len(failed) > 0 {
		s += fmt.Sprintf(", first at %s: %v", failed[0].Start.Format("15:04:05.000"), failed[0].Err)
	}
	return s
}
