package plan

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// TestRandomWalk walks through random worlds and checks, besides what holds
// for every plan: equal inputs give equal plans; what is taken over from the
// previous plan is what would be made anew; a plan never changes afterwards;
// services of equal KernelHash are made of the same; nothing changes by time
// alone before Wake, and something does at Wake.
func TestRandomWalk(t *testing.T) {
	seen, planes, amended := map[State]int{}, map[DataPlane]int{}, 0
	for seed := range uint64(32) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := walker{world: newWorld(t), Rand: rand.New(rand.NewPCG(seed, 1)), rules: map[uint64]string{}}
			r.in.Policy.Mode = pick(r.Rand, ModeUserspace, ModeIPTables, ModeIPTables, ModeIPVS, ModeIPVS, ModeAuto, ModeAuto, ModeAuto)
			r.in.Caps = pick(r.Rand, allCaps, bothCaps, bothCaps, bothCaps)
			defaultScheduler(pick(r.Rand, "", "", "sed"))(r.world)
			for range 80 {
				r.step()
				for _, s := range r.previous.Services {
					seen[s.State]++
					planes[s.DataPlane]++
				}
			}
			amended += r.amended
		})
	}
	if amended < 50 {
		t.Errorf("the walk saw %d plans that were made of the one before, and differ from it", amended)
	}
	for _, d := range []DataPlane{Userspace, IPTables, IPVS, None} {
		if planes[d] < 50 {
			t.Errorf("the walk saw data plane %q %d times only", d, planes[d])
		}
	}
	for _, s := range allStates {
		if seen[s] < 5 {
			t.Errorf("the walk saw state %q %d times only", s, seen[s])
		}
	}
}

type walker struct {
	*world
	*rand.Rand
	rules  map[uint64]string // what rules are made of, by KernelHash
	dumped string            // the previous plan, when it was made
	// amended counts the plans that were made of the one before by looking at what
	// is new only.
	amended int
	joined  Delta // from plan from to the last
	from    *Plan
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

var names = []string{"a", "b", "c", "d", "e", "sctp"}

func keyOf(name string) service.Key {
	k := port(name).Key
	if name == "sctp" {
		k.Protocol = service.SCTP
	}
	return k
}

func (r *walker) step() {
	for range 1 + r.IntN(3) {
		r.mutate()
		// Snapshots replace each other between two plans.
		r.given.Snapshot = updated(r.given.Snapshot, r.snapshot())
	}
	before, frozen := r.previous, r.dumped
	p := r.compute() // checks p
	in := r.given
	r.dumped = dump(r.t, p)
	if diff := difference(r.dumped, dump(r.t, first(Compute(before, in)))); diff != "" {
		r.t.Fatalf("equal inputs, unequal plans:\n%s", diff)
	}
	if diff := difference(dump(r.t, first(Compute(forgetful(before), in))), r.dumped); diff != "" {
		r.t.Fatalf("taken over from the previous plan (-anew +got):\n%s", diff)
	}
	if diff := difference(frozen, dump(r.t, before)); diff != "" {
		r.t.Fatalf("the previous plan was changed:\n%s", diff)
	}
	if n := len(r.delta.Changes); before != nil && in.Dirty != nil && n > 0 && n < len(p.Services) {
		r.amended++
	}
	r.checkJoined(p)
	r.checkWake(p)
	for _, s := range p.Services {
		made := madeOf(s, &r.in.Policy)
		if was, known := r.rules[s.KernelHash]; known && was != made {
			r.t.Fatalf("hash %d stands for\n%s\nand\n%s", s.KernelHash, was, made)
		}
		r.rules[s.KernelHash] = made
	}
}

// checkJoined joins the deltas of some plans and checks that they lead from the
// first to the last.
func (r *walker) checkJoined(p *Plan) {
	if r.IntN(4) == 0 {
		r.joined, r.from = Delta{}, p
		return
	}
	r.joined = r.joined.Then(r.delta)
	checkChanges(r.t, r.joined, r.from, p)
}

func first(p *Plan, _ Delta) *Plan { return p }

// madeOf returns in words what the rules of s are made of, as the renderers read it;
// weaker than what the hash covers.
func madeOf(s *Service, p *Policy) string {
	if s.Kernel == None {
		return "nothing"
	}
	out := fmt.Sprintln(s.Port.Key, s.Kernel, s.Port.Affinity, p.MasqueradeAll, p.PodCIDRs, s.Groups)
	for i := range s.Frontends {
		if f := &s.Frontends[i]; s.Serves(f) {
			out += fmt.Sprintln(*f)
			if s.Kernel == IPVS {
				out += fmt.Sprintln(p.ownAddress(f.Address.Addr()), s.ShortCircuits(f))
			}
			if s.Kernel == IPVS && f.Kind == NodePort {
				out += fmt.Sprintln(slices.DeleteFunc(slices.Clone(p.NodeAddresses), func(a netip.Addr) bool { return service.FamilyOf(a) != f.Family }))
			}
		}
	}
	if s.Kernel != IPVS {
		return out + fmt.Sprintln(s.Port.Algorithm)
	}
	for i := range s.Endpoints {
		out += fmt.Sprintln(s.Endpoints[i].Address, s.Endpoints[i].Local)
	}
	return out + s.Scheduler
}

// mutate changes one thing in the world.
func (r *walker) mutate() {
	name := pick(r.Rand, names...)
	k := keyOf(name)
	_, exists := r.ports[k]
	switch r.IntN(19) {
	case 0:
		delete(r.ports, k)
	case 1, 2, 3:
		r.ports[k] = r.port(name)
		r.eps[k] = r.endpoints()
	case 4:
		r.eps[k] = r.endpoints()
	case 5:
		if exists {
			addr := fmt.Sprintf("10.0.0.%d", 1+r.IntN(5))
			flaps := make([]time.Time, r.IntN(6))
			for i := range flaps {
				flaps[i] = r.in.Now.Add(time.Duration(i-len(flaps)) * 3 * time.Second)
			}
			r.health(name, addr, health.Status(r.IntN(3)), r.in.Now, flaps...)
		}
	case 6:
		r.in.Observed.Carried[k] += uint64(r.IntN(3))
	case 7:
		r.in.Pins[k] = pick(r.Rand, service.PreferAuto, service.PreferUserspace, service.PreferKernel)
	case 8:
		delete(r.in.Pins, k)
	case 9, 16, 17:
		if r.previous != nil {
			if s := r.previous.Find(k); s != nil {
				r.in.Failed[k] = Failure{Since: r.in.Now, Reason: "no memory", Hash: s.KernelHash}
			}
		}
	case 10:
		clear(r.in.Failed)
	case 11:
		r.in.Policy.NodeAddresses = pick(r.Rand, nil, addrs("192.168.0.1"), addrs("192.168.0.1", "203.0.113.1", "fd00:1::1"))
	case 14:
		r.in.Policy.ExcludeCIDRs = pick(r.Rand, nil, prefixes("10.0.0.0/30"), prefixes("10.0.0.0/29"), prefixes("fd00::/64", "10.0.0.4/30"))
	case 12:
		unusable(pick(r.Rand, nil, map[string]string{"mh": "no module ip_vs_mh", "sed": "no module"}, map[string]string{"rr": "gone"}))(r.world)
	case 18:
		var ejected []string
		for range r.IntN(4) {
			ejected = append(ejected, fmt.Sprintf("%s%d", pick(r.Rand, "10.0.0.", "fd00::"), 1+r.IntN(5)))
		}
		r.eject(ejected...)
	case 13:
		forward(r.IntN(4) != 0, r.IntN(3) != 0)(r.world)
	default:
		switch {
		case r.previous == nil:
		default:
			r.program()
		}
	}
	r.in.Now = r.in.Now.Add(time.Duration(r.IntN(8000)) * time.Millisecond)
}

func (r *walker) port(name string) service.Port {
	p := port(name)
	p.Key = keyOf(name)
	p.Created = t0.Add(time.Duration(r.IntN(3)) * time.Hour)
	p.ClusterIPs = addrs(fmt.Sprintf("10.96.0.%d", 1+r.IntN(6)))
	if r.IntN(3) == 0 {
		p.ClusterIPs = append(p.ClusterIPs, netip.MustParseAddr(fmt.Sprintf("fd96::%d", 1+r.IntN(6))))
	}
	p.Number = pick[uint16](r.Rand, 80, 443)
	if r.IntN(2) == 0 {
		p.NodePort, p.ExternallyAccessible = uint16(30000+r.IntN(4)), true
		p.LoadBalancerIPs = addrs(fmt.Sprintf("203.0.113.%d", 1+r.IntN(4)))
		p.ExternalIPs = addrs(fmt.Sprintf("203.0.113.%d", 1+r.IntN(4)))
		p.SourceRanges = pick(r.Rand, nil, prefixes("198.51.100.0/24"), prefixes("192.168.0.0/16", "fd00::/8"))
	}
	p.InternalLocal, p.ExternalLocal = r.IntN(3) == 0, r.IntN(2) == 0
	p.Algorithm, p.AlgorithmGiven = pick(r.Rand, service.Algorithms...), r.IntN(2) == 0
	p.Scheduler = pick(r.Rand, "", "", "", "wlc", "mh")
	p.ProxyProtocol = pick[service.ProxyProtocol](r.Rand, 0, 0, 0, 0, 2)
	p.Prefer = pick(r.Rand, service.PreferAuto, service.PreferAuto, service.PreferUserspace, service.PreferKernel)
	p.Health.Kind = pick(r.Rand, p.Health.Kind, p.Health.Kind, service.CheckOff)
	return p
}

func (r *walker) endpoints() []service.Endpoint {
	out := make([]service.Endpoint, r.IntN(6))
	for i := range out {
		e := endpoint(fmt.Sprintf("%s%d n%d", pick(r.Rand, "10.0.0.", "10.0.0.", "fd00::"), 1+r.IntN(5), 1+r.IntN(3)))
		e.Ready = r.IntN(4) != 0
		e.Serving = e.Ready || r.IntN(2) == 0
		e.Terminating = r.IntN(4) == 0
		e.Weight = pick[uint16](r.Rand, 0, 1, 1, 1, 3)
		if r.IntN(2) == 0 {
			e.Hints = &service.Hints{Zones: []string{pick(r.Rand, "zone-a", "zone-b")}}
		}
		out[i] = e
	}
	return out
}

// checkWake lets time pass and nothing else.
func (r *walker) checkWake(p *Plan) {
	at := p.Wake
	if at.IsZero() {
		at = p.Time.Add(24 * time.Hour)
	}
	in := r.given
	in.Dirty = map[service.Key]bool{}
	in.Now = at.Add(-1)
	services := dumpServices(r.t, p)
	if diff := difference(services, dumpServices(r.t, first(Compute(p, in)))); diff != "" {
		r.t.Fatalf("changed before it was to wake at %v:\n%s", p.Wake, diff)
	}
	if p.Wake.IsZero() {
		return
	}
	in.Now = p.Wake
	if services == dumpServices(r.t, first(Compute(p, in))) {
		r.t.Fatalf("nothing changed at wake %v", p.Wake)
	}
}

// forgetful returns p such that nothing of it is taken over but memories.
func forgetful(p *Plan) *Plan {
	if p == nil {
		return nil
	}
	out := *p
	out.kernel.why = "unlike any other"
	out.snapshot = ported(p.snapshot)
	return &out
}

// ported is s with other ports, so that conflicts are held again.
func ported(s *service.Snapshot) *service.Snapshot {
	var b service.Builder
	for p := range s.All() {
		moved := *p
		moved.Number = 1
		_ = b.AddPort(moved)
	}
	return b.Build()
}

// difference returns how two dumps differ, a value of theirs a line.
func difference(a, b string) string {
	if a == b {
		return ""
	}
	return cmp.Diff(strings.Split(a, ","), strings.Split(b, ","))
}

// dump is everything of p that others can see, and what it remembers.
func dump(t *testing.T, p *Plan) string {
	t.Helper()
	if p == nil {
		return ""
	}
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Services {
		b = fmt.Appendf(b, "%+v\n", *s.record)
	}
	return string(b)
}

func dumpServices(t *testing.T, p *Plan) string {
	t.Helper()
	b, err := json.Marshal(p.Services)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
