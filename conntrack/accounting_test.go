package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func listOf(flows ...Flow) func(...Wanted) ([]Flow, error) {
	return func(...Wanted) ([]Flow, error) { return flows, nil }
}

// ledger is an Accounting for one service, with what tests do to it.
type ledger struct {
	*Accounting
	t   *testing.T
	key service.Key
}

func setPlan(a *Accounting, p *plan.Plan) { a.SetPlan(p, plan.Between(a.plan, p)) }

func newLedger(t *testing.T) ledger {
	a := NewAccounting(isLocal)
	setPlan(a, planOf(serviceOf(udpKey("dns"), 10)))
	l := ledger{a, t, udpKey("dns")}
	l.refresh() // nothing was there before
	return l
}

func (l ledger) refresh(flows ...Flow) {
	l.t.Helper()
	if err := l.Refresh(0, listOf(flows...)); err != nil {
		l.t.Fatal(err)
	}
}

func (l ledger) want(after string, want Figures) {
	l.t.Helper()
	if diff := cmp.Diff(want, l.Figures()[l.key].Figures); diff != "" {
		l.t.Errorf("after %s (-want +got):\n%s", after, diff)
	}
	if diff := cmp.Diff(want, l.Meter(l.key).Figures().Figures); diff != "" { // Figures has settled it
		l.t.Errorf("of it alone, after %s (-want +got):\n%s", after, diff)
	}
}

// counted is a flow of the service by the kernel, with bytes.
func counted(id uint32, bytes uint64) Flow {
	f := flow(service.IPv4, service.UDP, at(service.IPv4, services, 10, 53), at(service.IPv4, pods, 2, 5353))
	f.ID, f.OrigPackets, f.OrigBytes, f.ReplyPackets, f.ReplyBytes = id, bytes/10, bytes, bytes/10, 2*bytes
	return f
}

func total(active int64, total, bytes uint64) Figures {
	return Figures{Active: active, Total: total, BytesIn: bytes, BytesOut: 2 * bytes}
}

// What counts: flows to a frontend of the service that the kernel rewrote to
// one of its endpoints, and nothing else.
func TestAccountingCountsTheKernelDataPlane(t *testing.T) {
	for _, protocol := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
		for _, family := range service.Families {
			k := udpKey("dns")
			k.Protocol = protocol
			other := udpKey("other")
			if protocol == service.UDP {
				other.Protocol = service.TCP
			}
			a := NewAccounting(isLocal)
			setPlan(a, planOf(serviceOf(k, 10, withoutEndpoint(3)), serviceOf(other, 10)))
			if err := a.Refresh(0, listOf()); err != nil { // nothing was there before
				t.Fatal(err)
			}
			got, want := map[string]uint64{}, map[string]uint64{}
			for i, d := range destinations {
				for _, to := range targets {
					dst := d.addr(family)
					f := flow(family, protocol, dst, to.addr(family, dst))
					before := a.Figures()[k].Total
					a.Ended(f)
					if err := a.Refresh(0, listOf(f)); err != nil {
						t.Fatal(err)
					}
					name := d.name + " to " + to.name
					if got[name] = a.Figures()[k].Total - before; got[name] == 0 {
						delete(got, name)
					}
					if i < 3 && to.name == "endpoint" {
						want[name] = 2 // one ended, one live
					}
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s: counted (-want +got):\n%s", protocol, family, diff)
			}
		}
	}
}

// TestAccountingOfFailures: a connection counts once it is known whether an endpoint
// took it, and then once.
func TestAccountingOfFailures(t *testing.T) {
	tcp := func(state uint8, sent, answered uint64) Flow {
		f := counted(1, 0)
		f.Protocol, f.TCPState, f.OrigPackets, f.ReplyPackets = service.TCP, state, sent, answered
		return f
	}
	const established = 3
	for _, tt := range []struct {
		name        string
		live, ended Flow
		then, after Figures
	}{
		{"taken", tcp(established, 2, 1), tcp(tcpTimeWait, 6, 5), Figures{Active: 1, Total: 1}, Figures{Total: 1}},
		{"refused", tcp(tcpSynSent, 1, 0), tcp(tcpClose, 1, 1), Figures{}, Figures{Failed: 1}},
		{"never answered", tcp(tcpSynSent, 3, 0), tcp(tcpSynSent, 6, 0), Figures{}, Figures{Failed: 1}},
		{"taken late", tcp(tcpSynRecv, 1, 1), tcp(tcpTimeWait, 4, 4), Figures{}, Figures{Total: 1}},
		{"without accounting", tcp(established, 0, 0), tcp(tcpTimeWait, 0, 0), Figures{Active: 1, Total: 1}, Figures{Total: 1}},
	} {
		a := NewAccounting(isLocal)
		l := ledger{a, t, tcpKey("web")}
		setPlan(a, planOf(serviceOf(l.key, 10)))
		l.refresh()
		l.refresh(tt.live)
		l.want(tt.name+": a list", tt.then)
		l.Ended(tt.ended)
		l.want(tt.name+": the end", tt.after)
	}
}

func TestAccountingEnds(t *testing.T) {
	t.Run("told", func(t *testing.T) {
		l := newLedger(t)
		l.refresh(counted(1, 100), counted(2, 10))
		l.want("list", total(2, 2, 110))
		l.Ended(counted(1, 150))
		l.want("end of one", total(1, 2, 160))
		l.refresh(counted(2, 20))
		l.want("list without it", total(1, 2, 170))
	})
	t.Run("told, never listed", func(t *testing.T) {
		l := newLedger(t)
		l.Ended(counted(1, 100))
		l.want("end", total(0, 1, 100))
	})
	t.Run("told after it was missed", func(t *testing.T) {
		l := newLedger(t)
		l.refresh(counted(1, 100))
		l.refresh()
		l.want("list without it", total(0, 1, 100))
		l.Ended(counted(1, 150))
		l.want("late end", total(0, 1, 150))
	})
	t.Run("never told", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l := newLedger(t)
			l.refresh(counted(1, 100))
			for range 5 {
				time.Sleep(endGrace)
				l.refresh()
				l.want("list without it", total(0, 1, 100))
			}
			if n := len(l.flows); n != 0 {
				t.Errorf("%d flows are still waited for", n)
			}
		})
	})
	t.Run("overlooked by a list", func(t *testing.T) {
		l := newLedger(t)
		l.refresh(counted(1, 100))
		l.refresh()
		l.refresh(counted(1, 120))
		l.want("list with it again", total(1, 1, 120))
	})
	t.Run("told while listing", func(t *testing.T) {
		l := newLedger(t)
		err := l.Refresh(0, func(...Wanted) ([]Flow, error) {
			l.Ended(counted(1, 150))
			return []Flow{counted(1, 100)}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		l.want("list from before the end", total(0, 1, 150))
	})
	t.Run("another with the same identity", func(t *testing.T) {
		l := newLedger(t)
		l.refresh(counted(1, 100))
		l.refresh(counted(1, 10))
		l.want("list with the other", total(1, 2, 110))
	})
}

// TestAccountingAfterRestart: what was there before is active, but isn't counted
// again; what it carries from then on is.
func TestAccountingAfterRestart(t *testing.T) {
	before := func(t *testing.T) ledger {
		a := NewAccounting(isLocal)
		setPlan(a, planOf(serviceOf(udpKey("dns"), 10)))
		l := ledger{a, t, udpKey("dns")}
		l.refresh(counted(1, 100), counted(2, 10))
		l.want("the first list", total(2, 0, 0))
		if got := endpointFigures(l.Figures()[l.key], at(service.IPv4, pods, 2, 5353)); got != total(2, 0, 0) {
			t.Errorf("its endpoint: got %+v", got)
		}
		return l
	}
	t.Run("told", func(t *testing.T) {
		l := before(t)
		l.refresh(counted(1, 150), counted(2, 10), counted(3, 7))
		l.want("a new one, and more bytes of an old one", total(3, 1, 57))
		l.Ended(counted(1, 160))
		l.want("the end of an old one", total(2, 1, 67))
		if got := endpointFigures(l.Figures()[l.key], at(service.IPv4, pods, 2, 5353)); got != total(2, 1, 67) {
			t.Errorf("its endpoint: got %+v", got)
		}
	})
	t.Run("never told", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l := before(t)
			l.refresh(counted(2, 10))
			l.want("list without one", total(1, 0, 0))
			time.Sleep(2 * endGrace)
			l.refresh(counted(2, 10))
			l.want("it is final", total(1, 0, 0))
		})
	})
	t.Run("overlooked by a list", func(t *testing.T) {
		l := before(t)
		l.refresh(counted(2, 10))
		l.refresh(counted(1, 120), counted(2, 10))
		l.want("list with it again", total(2, 0, 20))
	})
	t.Run("its service port is made anew", func(t *testing.T) {
		for _, listed := range []bool{false, true} {
			l := before(t)
			l.refresh(counted(1, 150), counted(2, 10), counted(3, 7))
			setPlan(l.Accounting, planOf())
			if listed {
				l.refresh(counted(1, 160), counted(2, 10), counted(3, 17))
				l.Ended(counted(2, 10))
			}
			setPlan(l.Accounting, planOf(serviceOf(l.key, 10)))
			l.Ended(counted(3, 27))
			l.refresh(counted(1, 170), counted(4, 5))
			if listed {
				l.want("a list", total(2, 1, 10+10+5))
				continue
			}
			l.want("a list", total(2, 1, 20+20+5))
		}
	})
	t.Run("another with the same identity", func(t *testing.T) {
		l := before(t)
		l.refresh(counted(1, 40), counted(2, 10))
		l.want("list with the other", total(2, 1, 40))
	})
}

func TestAccountingOfClosedConnections(t *testing.T) {
	k := udpKey("web")
	k.Protocol = service.TCP
	a := NewAccounting(isLocal)
	setPlan(a, planOf(serviceOf(k, 10)))
	if err := a.Refresh(0, listOf()); err != nil {
		t.Fatal(err)
	}
	f := flow(service.IPv4, service.TCP, at(service.IPv4, services, 10, 53), at(service.IPv4, pods, 2, 5353))
	for state, active := range map[uint8]int64{3: 1, 4: 1, tcpTimeWait: 0, tcpClose: 0} {
		f.TCPState = state
		if err := a.Refresh(0, listOf(f)); err != nil {
			t.Fatal(err)
		}
		if got := a.Figures()[k]; got.Active != active || got.Total != 1 || len(a.Connections()) != int(active) {
			t.Errorf("TCP state %d: got %+v, want %d active of 1", state, got.Figures, active)
		}
	}
	a.Ended(f)
	if got := a.Figures()[k]; got.Active != 0 || got.Total != 1 {
		t.Errorf("after the end: got %+v, want 0 active of 1", got.Figures)
	}
}

func TestAccountingFollowsPlans(t *testing.T) {
	l := newLedger(t)
	pod := at(service.IPv4, pods, 2, 5353)
	l.refresh(counted(1, 100))
	setPlan(l.Accounting, planOf(serviceOf(l.key, 10, withoutEndpoint(2))))
	l.Ended(counted(2, 10)) // to the removed endpoint, which still counts
	l.want("endpoint removed", total(1, 2, 110))
	if got := endpointFigures(l.Figures()[l.key], pod); got != total(1, 2, 110) {
		t.Errorf("removed endpoint with a connection: got %+v", got)
	}
	l.Ended(counted(1, 200))
	l.refresh()
	l.want("its last connection ended", total(0, 2, 210))
	if got := endpointFigures(l.Figures()[l.key], pod); got != (Figures{}) {
		t.Errorf("removed endpoint without connections is still there: %+v", got)
	}
	setPlan(l.Accounting, planOf(serviceOf(l.key, 10)))
	l.want("endpoint back", total(0, 2, 210))
	l.refresh(counted(3, 5))
	setPlan(l.Accounting, planOf())
	if got := l.Figures(); len(got) != 0 || len(l.Connections()) != 0 {
		t.Errorf("service removed: got %v and %v, want nothing", got, l.Connections())
	}
	l.Ended(counted(3, 5))
	setPlan(l.Accounting, planOf(serviceOf(l.key, 10)))
	l.want("service back", total(0, 0, 0))
}

// TestAccountingSettles: all that is read between two looks at the flows is of one moment, and costs none, whatever ends meanwhile.
func TestAccountingSettles(t *testing.T) {
	l := newLedger(t)
	meter := l.Meter(l.key)
	check := func(when string, want Figures) {
		t.Helper()
		if got := meter.Figures().Figures; got != want {
			t.Errorf("%s a meter has %+v, want %+v", when, got, want)
		}
	}
	check("before anything", Figures{})
	l.refresh(counted(1, 100))
	check("before it is settled", Figures{})
	l.Settle()
	check("settled,", total(1, 1, 100))
	l.Ended(counted(1, 150))
	check("while one ends", total(1, 1, 100))
	l.Settle()
	check("after that", total(0, 1, 150))
	setPlan(l.Accounting, planOf())
	check("service removed while it is read,", total(0, 1, 150))
	meter = l.Meter(l.key)
	check("not there,", Figures{})
}

func TestAccountingConnections(t *testing.T) {
	l := newLedger(t)
	a, b := counted(1, 100), counted(2, 10)
	b.OrigSrc = at(service.IPv4, clients, 10, 50000)
	l.refresh(b, a, flow(service.IPv4, service.UDP, at(service.IPv4, services, 99, 53), at(service.IPv4, pods, 2, 5353)))
	want := []Connection{{l.key, a}, {l.key, b}}
	if got := l.Connections(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	l.Ended(a)
	if got := l.Connections(); len(got) != 1 || got[0].Flow.OrigSrc != b.OrigSrc {
		t.Errorf("after the end of one: got %v", got)
	}
}

func TestAccountingRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t) // which lists
		time.Sleep(time.Second)
		lists := 0
		list := func(...Wanted) ([]Flow, error) { lists++; return nil, nil }
		for _, c := range []struct {
			wait time.Duration
			want int
		}{{0, 1}, {time.Millisecond, 1}, {time.Second, 2}} {
			time.Sleep(c.wait)
			if err := l.Refresh(time.Second, list); err != nil || lists != c.want {
				t.Errorf("after %s: %d lists, %v, want %d", c.wait, lists, err, c.want)
			}
		}
		slow := func(...Wanted) ([]Flow, error) { time.Sleep(300 * time.Millisecond); return nil, nil }
		if err := l.Refresh(0, slow); err != nil || l.BackgroundAge() != 30*time.Second {
			t.Errorf("after a list of 0.3 s: %v, background age %s", err, l.BackgroundAge())
		}
		l.refresh(counted(1, 100))
		broken := errors.New("broken")
		if err := l.Refresh(0, func(...Wanted) ([]Flow, error) { return nil, broken }); err != broken {
			t.Errorf("got %v, want the list's error", err)
		}
		l.want("a list that failed", total(1, 1, 100))
	})
}

// Events, lists, plans and readers meet; the race detector watches, and what
// has been counted stays.
func TestAccountingConcurrently(t *testing.T) {
	l := newLedger(t)
	const flows = 200
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range uint32(flows) {
			l.Ended(counted(i, 10))
		}
	})
	wg.Go(func() {
		for i := range uint32(flows) {
			if err := l.Refresh(0, listOf(counted(flows+i, 10))); err != nil {
				t.Error(err)
			}
			l.Ended(counted(flows+i, 10))
		}
	})
	wg.Go(func() {
		for range flows {
			setPlan(l.Accounting, planOf(serviceOf(l.key, 10)))
			l.Connections()
			if got := l.Figures()[l.key]; got.BytesOut != 2*got.BytesIn || got.Active < 0 {
				t.Errorf("torn figures %+v", got.Figures)
			}
		}
	})
	wg.Wait()
	l.want("all", total(0, 2*flows, 2*flows*10))
}

func BenchmarkAccountingRefresh(b *testing.B) {
	a := NewAccounting(isLocal)
	setPlan(a, planOf(serviceOf(udpKey("dns"), 10)))
	flows := make([]Flow, 100_000)
	for i := range flows {
		flows[i] = counted(uint32(i), 100)
		flows[i].OrigSrc = netip.AddrPortFrom(flows[i].OrigSrc.Addr(), uint16(i))
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := a.Refresh(0, listOf(flows...)); err != nil {
			b.Fatal(err)
		}
	}
}

// An address that passes from one service port to another in one plan counts
// for the new one, and the flows of the old one aren't lost to it.
func TestAccountingOfAddressThatChangesHands(t *testing.T) {
	for _, names := range [][2]string{{"a", "b"}, {"b", "a"}} {
		from, to := udpKey(names[0]), udpKey(names[1])
		a := NewAccounting(isLocal)
		setPlan(a, planOf(serviceOf(from, 10), serviceOf(to, 11, func(s *plan.Service) { s.Frontends = s.Frontends[:2] })))
		a.Ended(counted(1, 10))
		setPlan(a, planOf(serviceOf(from, 11, func(s *plan.Service) { s.Frontends = s.Frontends[:2] }), serviceOf(to, 10)))
		a.Ended(counted(2, 100))
		setPlan(a, planOf(serviceOf(to, 10)))
		a.Ended(counted(3, 1000))
		if got := a.Figures(); len(got) != 1 || got[to].Figures != total(0, 2, 1100) {
			t.Errorf("from %s to %s: got %+v", from, to, got)
		}
	}
}

// TestHadEndpointAt: also of plans that are past.
func TestHadEndpointAt(t *testing.T) {
	a := NewAccounting(isLocal)
	for _, p := range []*plan.Plan{nil, planOf(serviceOf(udpKey("dns"), 10)), planOf()} {
		if got, want := a.HadEndpointAt(5353), a.plan != nil; got != want {
			t.Errorf("before %v: %v, want %v", p, got, want)
		}
		setPlan(a, p)
	}
	if !a.HadEndpointAt(5353) || a.HadEndpointAt(5354) {
		t.Errorf("got %v and %v, want only the endpoints' port", a.HadEndpointAt(5353), a.HadEndpointAt(5354))
	}
}
