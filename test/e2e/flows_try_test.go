package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/flows"
)

// mostFailures are enough to know what is wrong: waiting for more takes minutes.
const mostFailures = 30

// tryAll makes attempts, many at a time: most wait.
func (w *flowWorld) tryAll(state string, all []attempt) {
	w.Helper()
	start := time.Now()
	var failures []string
	var mu sync.Mutex
	var wg sync.WaitGroup
	served, silent := make(chan struct{}, 8), make(chan struct{}, 64)
	for _, a := range all {
		slots := served
		if a.Want.Verdict == flows.Drop {
			slots = silent
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			mu.Lock()
			enough := len(failures) >= mostFailures
			mu.Unlock()
			if enough {
				return
			}
			// One thread in the namespace for all of it: they are dear.
			if err := a.client.Do(func() error { return w.try(a) }); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failures = append(failures, fmt.Sprintf("%s, %s, %s: %v", state, a.network, a, err))
			}
		})
	}
	wg.Wait()
	slices.Sort(failures)
	for _, f := range failures {
		w.Error(f)
	}
	if len(failures) >= mostFailures {
		w.Errorf("%s: no more was tried after %d failures", state, len(failures))
	}
	w.Logf("%s: %d attempts, %d failed, in %s", state, len(all), len(failures), time.Since(start).Round(time.Millisecond))
}

// try makes one attempt.
func (w *flowWorld) try(a attempt) error {
	switch a.Want.Verdict {
	case flows.Refuse:
		return w.tryRefused(a)
	case flows.Drop:
		ctx, cancel := context.WithTimeout(w.ctx, lasting(700*time.Millisecond))
		defer cancel()
		answer, err := a.ask(ctx)
		switch {
		case err == nil:
			return fmt.Errorf("answered by %s, want it dropped", w.names[answer.Backend])
		case !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded):
			return fmt.Errorf("%w, want it dropped", err)
		}
		return nil
	}
	return w.tryServed(a)
}

// tryRefused asks again where there is no answer at all: a datagram, or the word
// that nobody wants it, may get lost.
func (w *flowWorld) tryRefused(a attempt) error {
	answer, err := w.askPatiently(a)
	switch {
	case err == nil:
		return fmt.Errorf("answered by %s, want it refused", w.names[answer.Backend])
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w, want it refused", err)
	}
	return nil
}

// tryServed connects until every endpoint that may answer has done so, and once more:
// nobody else may, and each must see the client as the matrix says.
func (w *flowWorld) tryServed(a attempt) error {
	const enough = 40
	seen, all := map[string]bool{}, len(a.Want.Endpoints)
	if a.Service.Special == flows.Affinity {
		all = 1
	}
	for i := 0; len(seen) < all || i <= len(a.Want.Endpoints); i++ {
		if i == enough {
			return fmt.Errorf("%d connections reached only %v, want all of %v", i, seen, a.Want.Endpoints)
		}
		if i > 5 { // others who take turns with this one are to lose the step
			time.Sleep(rand.N(within(5 * time.Millisecond)))
		}
		answer, err := w.askPatiently(a)
		if err != nil {
			return fmt.Errorf("%w, want it served by %v", err, a.Want.Endpoints)
		}
		name := w.names[answer.Backend]
		if !slices.Contains(a.Want.Endpoints, name) {
			return fmt.Errorf("answered by %s, want one of %v", name, a.Want.Endpoints)
		}
		if seen[name] = true; len(seen) > all {
			return fmt.Errorf("answered by %v, want all by one", seen)
		}
		if want := a.Service.Target(name, a.Port) > 0; (answer.Backend == second(w.net.Backends[slices.Index(flows.EndpointNames, name)].Name)) != want {
			return fmt.Errorf("answered by %s, want its second target port: %v", answer.Backend, want)
		}
		want := a.Source
		if name == a.name {
			want = flows.AsNode // or the answer would never leave the pod
		}
		saw := flows.AsClient
		if w.isNode(answer) {
			saw = flows.AsNode
		}
		if saw != want || saw == flows.AsClient && !w.addressOf(a.client, answer.Peer) {
			return fmt.Errorf("%s saw %s, want the address of %v", name, answer.Peer, want)
		}
	}
	return nil
}

// isNode reports whether the endpoint saw an address of the node's.
func (w *flowWorld) isNode(a lab.Answer) bool {
	return slices.Contains(w.network.Node, a.Peer) || slices.Contains(w.net.Config.PodGateways(), a.Peer)
}

// askPatiently asks up to three times until there is an answer of some kind.
func (w *flowWorld) askPatiently(a attempt) (answer lab.Answer, err error) {
	for range 3 {
		ctx, cancel := context.WithTimeout(w.ctx, within(3*time.Second))
		answer, err = a.ask(ctx)
		cancel()
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	return answer, err
}

// ask makes one exchange. It runs in the client's namespace. A host's own datagram
// that a filter takes is reported to its sender at once (EPERM), dropped or refused
// alike: what it is, the next reading tells.
func (a attempt) ask(ctx context.Context) (lab.Answer, error) {
	d := net.Dialer{KeepAlive: -1}
	d.SetMultipathTCP(false)
	dial := d.DialContext
	if a.network == "sctp" {
		dial = a.client.Dial
	}
	c, err := dial(ctx, a.network, a.target.String())
	if err != nil {
		return lab.Answer{}, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return lab.Answer{}, err
	}
	if _, err := c.Write([]byte("hello\n")); err != nil && !errors.Is(err, syscall.EPERM) {
		return lab.Answer{}, err
	}
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	if err != nil {
		return lab.Answer{}, err
	}
	return lab.ParseAnswer(string(buf[:n]))
}

// secondPort is another port than [lab.LinePort] that endpoints of flows answer on, TCP
// and UDP, by the name [second].
const secondPort = lab.LinePort + 1

func second(backend string) string { return backend + "-second" }
