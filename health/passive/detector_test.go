package passive

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// world holds endpoints on nodes, those that answer probes and those that don't.
type world struct {
	t *testing.T
	*Detector

	mu      sync.Mutex
	nodes   map[health.Endpoint]string
	answers map[health.Endpoint]Answer
	flows   map[health.Endpoint][]Flow
	asked   map[health.Endpoint]int
	spared  map[health.Endpoint]time.Duration
	reset   []health.Endpoint
	down    bool // nothing answers at all
	hung    bool // only hosts do
	looked  int  // how often all endpoints were gone through
}

// run has a Detector of node "here" work while f changes the world, in fake time. Before, prepare does.
func run(t *testing.T, f func(w *world), prepare ...func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			t: t, nodes: map[health.Endpoint]string{}, answers: map[health.Endpoint]Answer{}, flows: map[health.Endpoint][]Flow{},
			asked: map[health.Endpoint]int{}, spared: map[health.Endpoint]time.Duration{},
		}
		w.Detector = New(Config{
			Log: slog.New(slog.DiscardHandler), Node: "here", Prober: w, Changed: func([]health.Endpoint) {},
			Endpoints: func() iter.Seq2[health.Endpoint, string] {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.looked++
				return maps.All(maps.Clone(w.nodes))
			},
			Flows: func(of []health.Endpoint) (map[health.Endpoint][]Flow, error) {
				w.mu.Lock()
				defer w.mu.Unlock()
				out := map[health.Endpoint][]Flow{}
				for _, e := range of {
					out[e] = append(out[e], w.flows[e]...)
				}
				return out, nil
			},
			Spare: func(e health.Endpoint, d time.Duration) {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.spared[e] = d
			},
			Reset: func(e health.Endpoint) {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.reset = append(w.reset, e)
			},
		})
		for _, p := range prepare {
			p(w)
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		f(w)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Endpoint answers as the world has it; silence takes until the end of time.
func (w *world) Endpoint(ctx context.Context, e health.Endpoint) Answer {
	w.mu.Lock()
	hung := w.hung
	w.mu.Unlock()
	return w.ask(ctx, e, hung)
}

// Host is silent where the endpoint is, but for one that only hangs.
func (w *world) Host(ctx context.Context, e health.Endpoint) Answer { return w.ask(ctx, e, false) }

func (w *world) ask(ctx context.Context, e health.Endpoint, hung bool) Answer {
	w.mu.Lock()
	w.asked[e]++
	a := w.answers[e]
	if w.down || hung {
		a = Nothing
	}
	w.mu.Unlock()
	if a == Nothing {
		<-ctx.Done()
	}
	return a
}

func at(host int) health.Endpoint {
	return health.Endpoint{Protocol: service.TCP, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, byte(host >> 8), byte(host)}), 8080)}
}

func client(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(n)}) }

// add adds an endpoint.
func (w *world) add(host int, node string, a Answer) health.Endpoint {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes[at(host)], w.answers[at(host)] = node, a
	return at(host)
}

func (w *world) set(e health.Endpoint, a Answer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answers[e] = a
}

// answer has a client be answered by an endpoint in the kernel.
func (w *world) answer(e health.Endpoint, id int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flows[e] = append(w.flows[e], Flow{ID: id, Open: true, Received: 60})
}

func (w *world) probes(e health.Endpoint) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[e]
}

// wait waits for d, and until what is reported then has been taken in.
func (w *world) wait(d time.Duration) { time.Sleep(d + 2*gather); synctest.Wait() }

// want checks whether endpoints are ejected.
func (w *world) want(when string, ejected bool, es ...health.Endpoint) {
	w.t.Helper()
	for _, e := range es {
		if got := w.View().Of(e); (got != nil) != ejected {
			w.t.Errorf("%s: %s: ejected is %v, want %v", when, e.Address, got, ejected)
		}
	}
}

// TestSilentEndpoint: between a client's first SYN again and its second, and back soon after it answers.
func TestSilentEndpoint(t *testing.T) {
	run(t, func(w *world) {
		dead, other := w.add(1, "n1", Nothing), w.add(2, "n2", Accepts)
		w.wait(time.Hour)
		if w.probes(dead)+w.probes(other) != 0 {
			t.Error("no client complained, and endpoints were probed")
		}
		for c := range 3 {
			w.Unanswered(dead, client(c), "SYNs")
		}
		w.wait(900 * time.Millisecond)
		w.want("after its clients' SYNs came again", true, dead)
		w.want("after its clients' SYNs came again", false, other)
		if got, want := w.View().Of(dead).Text(time.Now()), "ejected: silent to 4 probes after unanswered SYNs of 3 clients, 0s"; got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
		w.wait(2 * time.Minute)
		before := w.probes(dead)
		w.wait(time.Minute)
		if n := w.probes(dead) - before; n < 2*6 || n > 2*10 {
			t.Errorf("%d probes a minute for its return, want two each 6 to 10 s", n)
		}
	})
}

func TestReturn(t *testing.T) {
	run(t, func(w *world) {
		e := w.add(1, "n1", Nothing)
		eject := func() {
			w.Unanswered(e, client(1), "SYNs")
			w.wait(time.Second)
			w.want("silent", true, e)
		}
		eject()
		w.wait(time.Minute)
		w.set(e, Accepts)
		w.wait(10 * time.Second)
		w.want("ten seconds after it answers", false, e)
		w.wait(time.Second)
		w.set(e, Nothing)
		eject()
		w.set(e, Refuses)
		w.wait(10 * time.Second)
		if v := w.View().Of(e); v == nil || v.Reason != health.Refused {
			t.Errorf("its host is back and nothing listens: %+v, want it ejected for refusing", v)
		}
		w.Answered(e)
		w.wait(time.Millisecond)
		w.want("a client was answered", false, e)
	})
}

// TestAliveEndpoint: an answer to a probe or to another client refutes the one that complained, for a while.
func TestAliveEndpoint(t *testing.T) {
	run(t, func(w *world) {
		e := w.add(1, "n1", Accepts)
		for range 600 { // a client that a policy forbids
			w.Unanswered(e, client(1), "SYNs")
			w.wait(100 * time.Millisecond)
		}
		w.want("it answers probes", false, e)
		if n := w.probes(e); n > 8 {
			t.Errorf("%d probes in a minute for one client", n)
		}
		w.set(e, Nothing)
		w.Unanswered(e, client(2), "SYNs")
		w.wait(time.Second)
		w.want("another client complains", true, e)
	})
	for name, answered := range map[string]func(*world, health.Endpoint, int){
		"the kernel's clients are answered": (*world).answer,
		"userspace's clients are answered":  func(w *world, e health.Endpoint, _ int) { w.Answered(e) },
	} {
		run(t, func(w *world) { // a policy forbids this node
			e := w.add(1, "n1", Nothing)
			for i := range 100 {
				w.Unanswered(e, client(i%2), "SYNs")
				w.wait(200 * time.Millisecond)
				answered(w, e, i)
				w.want(name, false, e)
			}
		})
	}
	run(t, func(w *world) { // this node lacks ports
		e := w.add(1, "n1", Unknown)
		w.Unanswered(e, client(1), "SYNs")
		w.wait(time.Minute)
		w.want("probes couldn't be sent", false, e)
	})
}

// TestDeafEndpoint: one that never answers this node is given to clients again some minutes after it was ejected.
func TestDeafEndpoint(t *testing.T) {
	run(t, func(w *world) {
		e := w.add(1, "n1", Nothing)
		w.Unanswered(e, client(1), "SYNs")
		w.wait(time.Second)
		w.want("silent", true, e)
		w.wait(trialFirst + 20*time.Second)
		w.want("on trial", false, e)
		w.Unanswered(e, client(1), "SYNs")
		w.wait(time.Second)
		w.want("silent again", true, e)
		w.wait(trialFirst + 20*time.Second)
		w.want("silent again, for longer", true, e)
	})
}

func TestRefusingEndpoint(t *testing.T) {
	run(t, func(w *world) {
		e := w.add(1, "n1", Refuses)
		w.Refused(e, client(1))
		w.wait(900 * time.Millisecond)
		if v := w.View().Of(e); v == nil || v.Reason != health.Refused || w.spared[e] == 0 {
			t.Errorf("%+v, spared for %s; want it ejected, and its refusals let through", v, w.spared[e])
		}
		w.set(e, Accepts)
		w.wait(2 * time.Second)
		w.want("it accepts", false, e)
		w.Refused(e, client(1))
		w.wait(2 * time.Second)
		w.want("it refuses one client", false, e)
	})
	run(t, func(w *world) { // a client that was wrong about silence, again and again
		e := w.add(1, "n1", Accepts)
		for range 100 {
			w.Unanswered(e, client(1), "SYNs")
			w.wait(time.Second)
		}
		w.set(e, Refuses)
		w.Refused(e, client(1))
		w.wait(900 * time.Millisecond)
		if w.want("it refuses", true, e); w.spared[e] == 0 {
			t.Error("its refusals are kept from clients")
		}
	})
}

// TestDeadNode: two silent endpoints suffice to ask all others.
func TestDeadNode(t *testing.T) {
	run(t, func(w *world) {
		var dead []health.Endpoint
		for i := range 150 {
			dead = append(dead, w.add(i, "n1", Nothing))
		}
		deaf := w.add(600, "n2", Accepts)
		w.Unanswered(dead[0], client(1), "SYNs")
		w.Unanswered(dead[1], client(1), "SYNs")
		w.wait(900 * time.Millisecond)
		w.want("at once", true, dead[:2]...)
		w.wait(5 * time.Second)
		w.want("a moment later", true, dead...)
		w.want("on another node", false, deaf)
		if n := w.View().Nodes; len(n) != 1 || n[0].Name != "n1" || n[0].Silent != 150 {
			t.Errorf("silent nodes %+v, want n1 with all its endpoints", n)
		}
	})
}

// TestNodeWithOneAlive: an endpoint that no client complains of isn't ejected where something of its node answers.
func TestNodeWithOneAlive(t *testing.T) {
	run(t, func(w *world) {
		a, b, deaf := w.add(1, "n1", Nothing), w.add(2, "n1", Nothing), w.add(3, "n1", Nothing)
		w.add(4, "n1", Accepts)
		w.Unanswered(a, client(1), "SYNs")
		w.Unanswered(b, client(1), "SYNs")
		w.wait(3 * time.Second)
		w.want("clients complain", true, a, b)
		w.want("no client complains", false, deaf)
	})
}

// TestIsolatedNode: with three other nodes and more silent at once, nothing is ejected.
func TestIsolatedNode(t *testing.T) {
	run(t, func(w *world) {
		var all []health.Endpoint
		for i := range 40 {
			all = append(all, w.add(i, fmt.Sprintf("n%d", i%4), Accepts))
		}
		own := w.add(50, "here", Accepts)
		w.down = true
		for moment := range 4000 {
			if moment%20 == 0 {
				w.Unanswered(all[moment/20%8], client(1), "SYNs")
			}
			w.wait(time.Millisecond)
			w.want("cut off", false, append(all, own)...)
		}
		if i := w.View().Isolated; i == nil || i.Nodes < 3 {
			t.Fatalf("isolated is %+v, want it known", i)
		}
		w.mu.Lock()
		w.down = false
		w.mu.Unlock()
		w.wait(15 * time.Second)
		if i := w.View().Isolated; i != nil {
			t.Errorf("isolated is %+v although all answer again", i)
		}
	})
}

// TestHangEverywhere: a program that hangs on all nodes at once is no sign that this node is cut off: their hosts answer.
func TestHangEverywhere(t *testing.T) {
	run(t, func(w *world) {
		var all []health.Endpoint
		for i := range 4 {
			all = append(all, w.add(i, fmt.Sprintf("n%d", i), Accepts))
		}
		w.hung = true
		for i, e := range all {
			w.Unanswered(e, client(i), "SYNs")
		}
		w.wait(2 * time.Second)
		w.want("hanging", true, all...)
		if i := w.View().Isolated; i != nil {
			t.Errorf("isolated is %+v", i)
		}
	})
}

// TestNodesThatDieAtOnce: two of three other nodes' silence is theirs, that of three of four is taken for this node's, and the one
// verdict or the other stays.
func TestNodesThatDieAtOnce(t *testing.T) {
	for _, c := range []struct {
		dead, nodes int
		isolated    bool
	}{{2, 3, false}, {2, 4, false}, {3, 4, true}} {
		t.Run(fmt.Sprintf("%d of %d", c.dead, c.nodes), func(t *testing.T) {
			run(t, func(w *world) {
				var dead []health.Endpoint
				for i := range 3 * c.nodes {
					node, a := i%c.nodes, Accepts
					if node < c.dead {
						a = Nothing
					}
					if e := w.add(i, fmt.Sprintf("n%d", node), a); a == Nothing {
						dead = append(dead, e)
					}
				}
				for second := range 30 {
					for i, e := range dead {
						w.Unanswered(e, client(i), "SYNs")
					}
					w.wait(time.Second)
					if second < 3 {
						continue
					}
					if is := w.View().Isolated != nil; is != c.isolated {
						t.Errorf("after %d s, isolated is %v", second, is)
					}
					w.want(fmt.Sprintf("after %d s", second), !c.isolated, dead...)
				}
			})
		})
	}
}

func TestForgotten(t *testing.T) {
	run(t, func(w *world) {
		e := w.add(1, "n1", Nothing)
		w.Unanswered(at(9), client(1), "SYNs") // of no service
		w.Unanswered(e, client(1), "SYNs")
		w.wait(time.Second)
		w.want("silent", true, e)
		w.want("of no service", false, at(9))
		w.mu.Lock()
		delete(w.nodes, e)
		w.mu.Unlock()
		w.Follow()
		w.wait(time.Millisecond)
		w.want("its API took it away", false, e)
		w.add(1, "n2", Accepts)
		w.Follow()
		w.wait(time.Minute)
		w.want("its address is another's", false, e)
	})
}

func TestRestored(t *testing.T) {
	var dead, back health.Endpoint
	run(t, func(w *world) {
		w.wait(2 * time.Second)
		w.want("once probed", true, dead)
		w.want("once probed", false, back)
	}, func(w *world) {
		dead, back = w.add(1, "n1", Nothing), w.add(2, "n1", Accepts)
		known := func() *health.Ejection { return &health.Ejection{Since: time.Now(), Reason: health.Silent} }
		w.Restore(map[health.Endpoint]*health.Ejection{dead: known(), back: known()})
		w.want("at once", true, dead, back)
	})
}

// TestDeparted: connections are reset when an endpoint has left and its host is silent for five seconds.
func TestDeparted(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(w *world, e health.Endpoint)
		after time.Duration
		reset int
	}{
		"dead":                {func(w *world, e health.Endpoint) { w.answer(e, 1) }, 13 * time.Second, 1},
		"without connections": {func(*world, health.Endpoint) {}, time.Minute, 0},
		"draining":            {func(w *world, e health.Endpoint) { w.answer(e, 1); w.set(e, Refuses) }, 10 * time.Minute, 0},
		"cut off for four seconds": {func(w *world, e health.Endpoint) {
			w.answer(e, 1)
			time.AfterFunc(departedGather+4*time.Second, func() { w.set(e, Refuses) })
		}, 10 * time.Minute, 0},
		"back in the API": {func(w *world, e health.Endpoint) {
			w.answer(e, 1)
			time.AfterFunc(departedGather+2*time.Second, func() { w.add(1, "n1", Nothing); w.Follow() })
		}, 10 * time.Minute, 0},
		"of another service, too": {func(w *world, e health.Endpoint) {
			w.add(1, "n1", Nothing)
			w.answer(e, 1)
		}, time.Minute, 0},
		"deaf to this node, and its connections go on": {func(w *world, e health.Endpoint) {
			w.answer(e, 1)
			go func() {
				for range 88 {
					time.Sleep(500 * time.Millisecond)
					w.mu.Lock()
					w.flows[e] = []Flow{{ID: 1, Open: true, Received: w.flows[e][0].Received + 100}}
					w.mu.Unlock()
				}
			}()
		}, 45 * time.Second, 0},
		"this node is cut off": {func(w *world, e health.Endpoint) {
			for host := 2; host < 6; host++ {
				w.add(host, fmt.Sprint("n", host), Nothing)
			}
			w.answer(e, 1)
		}, time.Minute, 0},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				e := at(1)
				c.do(w, e)
				w.Departed([]health.Endpoint{e})
				w.Follow()
				w.wait(c.after)
				w.mu.Lock()
				defer w.mu.Unlock()
				if len(w.reset) != c.reset {
					t.Errorf("reset %v, want %d", w.reset, c.reset)
				}
				if w.flows[e] == nil && w.looked > 0 {
					t.Errorf("all endpoints were gone through %d times though it had no connections", w.looked)
				}
			})
		})
	}
	e := at(1)
	run(t, func(w *world) {
		w.answer(e, 1)
		w.Departed([]health.Endpoint{e})
		w.Follow()
		w.wait(3 * time.Second) // four questions, and what was done together in a moment
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.reset) != 1 {
			t.Errorf("ejected as silent before: reset %v, want it at once", w.reset)
		}
	}, func(w *world) {
		w.add(1, "n1", Nothing)
		w.Restore(map[health.Endpoint]*health.Ejection{e: {Since: time.Now().Add(-time.Minute), Reason: health.Silent}})
		delete(w.nodes, e)
	})
}
