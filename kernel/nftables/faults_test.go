package nftables_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// faulty is a socket whose calls fail as faults say.
type faulty struct {
	nftables.Conn
	faults *kerneltest.Faults
}

func (f faulty) Transaction(subsystem uint16, requests [][]byte) error {
	return f.faults.Netlink(func() error { return f.Conn.Transaction(subsystem, requests) })
}

func (f faulty) Dump(request func([]byte) []byte, each func([]byte)) error {
	return f.faults.Netlink(func() error { return f.Conn.Dump(request, each) })
}

func (f faulty) Do(n int, request func([]byte, int) []byte, reply func(int, []byte, error)) error {
	return f.faults.Netlink(func() error { return f.Conn.Do(n, request, reply) })
}

// step does what the agent does for one plan, and goes on after errors as it does.
func (n *node) step(p *plan.Plan, faults *kerneltest.Faults) {
	d := plan.Between(n.was, p)
	d.Full = n.was == nil
	n.was = p
	n.plane.Follow(n.t.Context(), p, d)
	n.plane.Want(p, d)
	n.plane.Sync(n.t.Context(), func() {})
	if faults.Died() {
		n.restart()
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return faulty{s, faults} })
	}
}

// lines leaves the order of elements out of account.
func lines(listing string) []string { return strings.Split(sorted(listing), "\n") }

// TestFaults: random plans while calls to the kernel fail, or are cut short by kproxy's
// death, lead where the last plan by itself leads; and a fault at any single call is made up for.
func TestFaults(t *testing.T) {
	t.Parallel()
	arrive := func(n *node, p *plan.Plan, faults *kerneltest.Faults) {
		n.t.Helper()
		faults.Stop()
		n.program(p)
		n.sync() // chains that were busy a moment ago
		got := n.listing()
		run(n.t, "nft flush ruleset")
		n.restart()
		n.program(p)
		if diff := cmp.Diff(lines(n.listing()), lines(got)); diff != "" {
			n.t.Fatalf("after %d faults (-from a fresh start +got):\n%s", faults.Count(), diff)
		}
	}
	for seed := range uint64(12) {
		n, faults := newNode(t), kerneltest.NewFaults(seed, 0.1)
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return faulty{s, faults} })
		walk := kerneltest.NewWalk(seed, plan.ModeNFTables, plan.NFTables, 12)
		var p *plan.Plan
		for range 15 {
			p = walk.Next()
			n.step(p, faults)
		}
		if faults.Count() == 0 {
			t.Error("no fault was injected")
		}
		arrive(n, p, faults)
	}
	walk := kerneltest.NewWalk(11, plan.ModeNFTables, plan.NFTables, 6)
	first, second := walk.Next(), walk.Next()
	way := func(faults *kerneltest.Faults) (before, after int) {
		n := newNode(t)
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return faulty{s, faults} })
		n.program(first)
		before = faults.Calls()
		n.step(second, faults)
		after = faults.Calls()
		arrive(n, second, faults)
		return before, after
	}
	before, after := way(&kerneltest.Faults{})
	if after-before < 5 {
		t.Fatalf("the way from one plan to the other takes %d calls", after-before)
	}
	for _, kind := range []kerneltest.FaultKind{kerneltest.Refused, kerneltest.Late, kerneltest.Death} {
		for i := before + 1; i <= after; i++ {
			if faults := kerneltest.FaultAt(i, kind); true {
				way(faults)
				if faults.Count() != 1 {
					t.Errorf("%s at call %d: %d faults", kind, i-before, faults.Count())
				}
			}
		}
	}
}

// staged tells of every transaction; one fails.
type staged struct {
	nftables.Conn
	after func()
	n     *int
	fails int
}

func (s staged) Transaction(subsystem uint16, requests [][]byte) error {
	if *s.n++; *s.n == s.fails {
		return unix.ENOBUFS
	}
	err := s.Conn.Transaction(subsystem, requests)
	s.after()
	return err
}

// TestFirstWriteOfMany: many services go to an empty kernel in several transactions, and no service leads to an
// endpoint before that is there. Whichever of them fails, the next pass arrives.
func TestFirstWriteOfMany(t *testing.T) {
	t.Parallel()
	p := plane(kerneltest.Many(3200, 2)...)
	elements := func(set string) int { return strings.Count(run(t, "nft list map ip kproxy "+set), " . tcp . ") }
	transactions := 1
	for fails := 0; fails <= transactions; fails++ {
		n := newNode(t)
		made, led, parts := 0, 0, 0
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn {
			return staged{s, func() {
				if fails > 0 {
					return
				}
				services, backends := elements("services"), elements("backends")
				if services > 0 && backends != 6400 {
					t.Errorf("%d services lead to %d endpoints", services, backends)
				}
				if backends > 0 && backends < 6400 {
					parts++
				}
				led = services
			}, &made, fails}
		})
		if fails == 0 {
			n.program(p)
			if transactions = made; led != 3200 || parts < 2 {
				t.Errorf("%d services are programmed, after %d transactions with a part of the endpoints", led, parts)
			}
			continue
		}
		n.step(p, &kerneltest.Faults{})
		n.step(p, &kerneltest.Faults{})
		// While the kernel enlarges a set's table, which it does a while later on a busy machine, lists of it lack some
		// elements (rhashtable_walk_next in lib/rhashtable.c).
		for began := time.Now(); (elements("services") != 3200 || elements("backends") != 6400) && time.Since(began) < time.Minute; {
			time.Sleep(100 * time.Millisecond)
		}
		n.restart()
		if r := n.program(p); r.Applied.Entries != 0 {
			t.Errorf("with transaction %d of %d failed, %d elements were left to be changed", fails, transactions, r.Applied.Entries)
		}
	}
}

// TestBadServiceFailsAlone: the kernel refuses a chain's name that is too long, and with it the
// whole transaction. All other services are programmed, at the start and afterwards, and the
// bad one is as soon as it isn't bad any more.
func TestBadServiceFailsAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	named := func(i int, name string) *plan.Service {
		return inTurn(kerneltest.Service(name, service.TCP, kerneltest.Cluster(fmt.Sprintf("10.96.1.%d:80", i)), kerneltest.Endpoints("10.1.0.1:80", "10.1.0.2:80")))
	}
	bad := strings.Repeat("long-", 60)
	sync := func(p *plan.Plan, retry bool, want ...string) {
		t.Helper()
		d := plan.Between(n.was, p)
		if retry {
			d = plan.Delta{}
		}
		n.was = p
		n.follow(p, d)
		r := n.plane.Sync(t.Context(), func() {})
		var failed []string
		for k, why := range r.Failed {
			if failed = append(failed, k.Name[len(k.Name)-7:]); !errors.Is(why, unix.ERANGE) && !errors.Is(why, unix.EINVAL) {
				t.Errorf("%s failed because %v", k.Name[290:], why)
			}
		}
		slices.Sort(failed)
		if r.Err != nil || !slices.Equal(failed, want) || len(want) > 0 && !r.Tried {
			t.Fatalf("failed: %v, %v; want %v", failed, r.Err, want)
		}
		programmed := slices.Collect(maps.Keys(n.plane.Programmed()))
		if len(programmed) != len(p.Services)-len(want) {
			t.Errorf("programmed are %v", programmed)
		}
		time.Sleep(50 * time.Millisecond)
		if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
			t.Errorf("Check says %v, %v", found, err)
		}
	}
	good := kerneltest.Many(40, 3)
	sync(plane(append(good[:10:10], named(1, "fine"))...), false)
	p := plane(append(good[:20:20], named(1, "fine"), named(2, bad), named(3, bad+"er"))...)
	sync(p, false, "g-long-", "long-er")
	sync(plane(append(good[:30:30], named(1, "fine"), named(2, bad), named(3, bad+"er"))...), false, "g-long-", "long-er")
	p = plane(append(good, named(1, "fine"), named(2, bad), named(3, "better"))...)
	sync(p, false, "g-long-")
	sync(p, true, "g-long-")
	if same := *p; n.plane.Want(&same, plan.Delta{}) {
		t.Error("a plan that wants what failed is taken for news")
	}
	last := plane(append(good, named(1, "fine"), named(3, "better"))...)
	sync(last, false)
	got := n.listing()
	run(t, "nft flush ruleset")
	n.restart()
	n.program(last)
	if diff := cmp.Diff(lines(n.listing()), lines(got)); diff != "" {
		t.Errorf("(-from a fresh start +got):\n%s", diff)
	}
}

// follow follows p as the agent does: after an error once more, by a plan that needs no rules at once.
func (n *node) follow(p *plan.Plan, d plan.Delta) {
	n.t.Helper()
	r := n.plane.Follow(n.t.Context(), p, d)
	if r.Err != nil {
		r = n.plane.Follow(n.t.Context(), p, d)
	}
	if r.Err != nil {
		n.t.Fatal(r.Err)
	}
	n.plane.Want(p, d)
}

// TestChangeIsOneTransaction: endpoints, who carries services, and chains that weren't there before.
func TestChangeIsOneTransaction(t *testing.T) {
	n, made := newNode(t), 0
	nftables.KeepSpare(n.plane)
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return staged{s, func() {}, &made, 0} })
	many := kerneltest.Many(4, 2)
	kerneltest.InUserspace(many[1])
	n.program(plane(many...))
	for _, p := range []*plan.Plan{
		plane(append(kerneltest.Many(2, 3), many[2], many[3])...),
		plane(many[:3]...),
		plane(many...),
	} {
		before := made
		if r := n.program(p); r.Holds == nil || !r.Tried || made != before+1 {
			t.Errorf("a change took %d transactions: %+v", made-before, r)
		}
	}
}

// TestRefusedChangeLeavesAll: a transaction that the kernel refuses, or that meets what others have changed, changes nothing.
// The next pass brings all but what is refused, with the reason, and a later one the rest.
func TestRefusedChangeLeavesAll(t *testing.T) {
	was, is := kerneltest.Many(4, 2), kerneltest.Many(4, 3)
	bad := is[2].Port.Key
	kerneltest.InUserspace(was[0])
	word := ""
	for name, before := range map[string]func(){
		"refused": func() { word = bad.String() },
		"an element was deleted": func() {
			run(t, "nft delete element ip kproxy services '{ "+strings.Replace(was[1].Frontends[0].Address.String(), ":", " . tcp . ", 1)+" }'")
		},
		"the tables were deleted":    func() { run(t, "nft flush ruleset") },
		"a set of others was filled": func() { run(t, "nft add table ip foreign") },
	} {
		n := newNode(t)
		first, second := plane(was...), plane(is...)
		n.program(first)
		word = ""
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return picky{s, &word} })
		before()
		list := func() string { return run(t, "nft -s list ruleset") }
		left := list()
		d := plan.Between(first, second)
		r := n.plane.Follow(t.Context(), second, d)
		if wrong := name != "a set of others was filled"; (r.Err != nil) != wrong || wrong && list() != left {
			t.Errorf("%s: %v; of\n%s\nis left\n%s", name, r.Err, left, list())
		}
		n.follow(second, d)
		r = n.plane.Sync(t.Context(), func() {})
		programmed := n.plane.Programmed()
		if _, there := programmed[bad]; r.Err != nil || there == (word != "") || len(r.Failed) > 0 && !errors.Is(r.Failed[bad], unix.ENOSPC) || len(programmed)+len(r.Failed) != 4 {
			t.Errorf("%s: %v, failed %v, programmed %v", name, r.Err, r.Failed, programmed)
		}
		word = ""
		if r := n.plane.Sync(t.Context(), func() {}); !r.OK() || len(n.plane.Programmed()) != 4 {
			t.Errorf("%s: later %v, programmed %v", name, r.Err, n.plane.Programmed())
		}
		got := n.listing()
		run(t, "nft flush ruleset")
		n.restart()
		n.program(second)
		if diff := cmp.Diff(lines(n.listing()), lines(got)); diff != "" {
			t.Errorf("%s (-from a fresh start +got):\n%s", name, diff)
		}
	}
}

// disturbed does something before a transaction.
type disturbed struct {
	nftables.Conn
	before func()
}

func (d disturbed) Transaction(subsystem uint16, requests [][]byte) error {
	d.before()
	return d.Conn.Transaction(subsystem, requests)
}

// TestTablesDeletedAmidAPass: another program deletes the tables before a pass, and before any two of its transactions. The pass arrives, and takes
// that for no service's fault.
func TestTablesDeletedAmidAPass(t *testing.T) {
	t.Parallel()
	first, second := plane(kerneltest.Many(5, 2)...), plane(kerneltest.Many(5, 3)...)
	for at := 1; ; at++ {
		n, made := newNode(t), 0
		n.program(first)
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn {
			return disturbed{s, func() {
				if made++; made == at || made == at+2 {
					run(t, "nft flush ruleset")
				}
			}}
		})
		run(t, "nft flush ruleset")
		d := plan.Between(first, second)
		if r := n.plane.Follow(t.Context(), second, d); r.Err == nil {
			t.Fatal("what changes elements of tables that aren't there succeeds")
		}
		n.plane.Want(second, d)
		r := n.plane.Sync(t.Context(), func() {})
		if r.Err != nil || len(r.Failed) > 0 {
			t.Errorf("deleted before transactions %d and %d: %v, of services %v", at, at+2, r.Err, r.Failed)
		}
		if made < at {
			if at < 4 {
				t.Errorf("a pass takes %d transactions", made)
			}
			return
		}
	}
}

// picky refuses requests in which a word is; none while that is empty.
type picky struct {
	nftables.Conn
	word *string
}

func (p picky) refused(requests [][]byte) (out []netlink.RequestError) {
	for i, r := range requests {
		if *p.word != "" && bytes.Contains(r, []byte(*p.word)) {
			out = append(out, netlink.RequestError{Index: i, Err: unix.ENOSPC})
		}
	}
	return out
}

func (p picky) Transaction(subsystem uint16, requests [][]byte) error {
	if r := p.refused(requests); len(r) > 0 {
		return &r[0]
	}
	return p.Conn.Transaction(subsystem, requests)
}

func (p picky) Refusals(subsystem uint16, requests [][]byte) ([]netlink.RequestError, error) {
	if r := p.refused(requests); len(r) > 0 {
		return r, nil
	}
	return p.Conn.Refusals(subsystem, requests)
}

// TestRefusedServiceIsAskedForAgain: what the kernel refuses for a while is programmed by the first pass that no change comes with.
func TestRefusedServiceIsAskedForAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	many := kerneltest.Many(6, 2)
	first, second, third := plane(many[:3]...), plane(many[:5]...), plane(many...)
	n.program(first)
	word := many[4].Port.Key.String()
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return picky{s, &word} })
	step := func(is *plan.Plan, come ...*plan.Service) kernel.Result {
		var d plan.Delta
		for _, s := range come {
			d.Changes = append(d.Changes, plan.Change{Is: s})
		}
		n.follow(is, d)
		return n.plane.Sync(t.Context(), func() {})
	}
	if r := step(second, many[3:5]...); len(r.Failed) != 1 {
		t.Fatalf("%d services fail, want 1", len(r.Failed))
	}
	word = ""
	step(third, many[5])
	if r := n.plane.Sync(t.Context(), func() {}); !r.OK() || len(n.plane.Programmed()) != 6 {
		t.Errorf("%v, %d of 6 services are programmed", r.Err, len(n.plane.Programmed()))
	}
}

// refusing is a kernel that lacks something.
type refusing struct {
	nftables.Conn
	err error
}

func (r refusing) Transaction(uint16, [][]byte) error {
	return &netlink.RequestError{Index: 3, Err: r.err}
}
func (r refusing) Refusals(uint16, [][]byte) ([]netlink.RequestError, error) {
	return []netlink.RequestError{{Index: 3, Err: r.err}}, nil
}

// TestFailuresOfTheWholeTransaction: what is wrong with none of the services fails for all, and
// leaves what the kernel holds.
func TestFailuresOfTheWholeTransaction(t *testing.T) {
	t.Parallel()
	for _, errno := range []unix.Errno{unix.ENOBUFS, unix.EINTR, unix.EMSGSIZE, unix.ENOMEM, unix.EPERM, unix.EOPNOTSUPP} {
		n := newNode(t)
		before := plane(kerneltest.Many(3, 2)...)
		n.program(before)
		want := n.listing()
		var socket nftables.Conn
		nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { socket = s; return refusing{s, errno} })
		p := plane(kerneltest.Many(5, 2)...)
		d := plan.Between(before, p)
		if r := n.plane.Follow(t.Context(), p, d); !errors.Is(r.Err, errno) || r.Holds != nil {
			t.Errorf("%v: Follow says %v", errno, r.Err)
		}
		n.plane.Want(p, d)
		if r := n.plane.Sync(t.Context(), func() {}); !errors.Is(r.Err, errno) || len(r.Failed) > 0 || errno == unix.EPERM && !errors.Is(r.Err, kernel.ErrPermission) {
			t.Errorf("%v: %v, failed %v", errno, r.Err, r.Failed)
		}
		if got := n.plane.Programmed(); len(got) != 3 {
			t.Errorf("%v: %d services count as programmed, want 3", errno, len(got))
		}
		if now := n.listing(); sorted(now) != sorted(want) {
			t.Errorf("%v: the kernel has\n%s", errno, now)
		}
		nftables.Through(n.plane, func(nftables.Conn) nftables.Conn { return socket })
		n.was = before
		n.program(p)
		if got := n.plane.Programmed(); len(got) != 5 {
			t.Errorf("%v: then %d services count as programmed, want 5", errno, len(got))
		}
	}
}

// TestKernelsWithoutIt: a kernel that has no nf_tables, or an older one, is told from one that
// doesn't let this process, and what is missing and what to do instead are said.
func TestKernelsWithoutIt(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	release, err := kernel.Release()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		err  unix.Errno
		want []string
	}{
		{unix.EOPNOTSUPP, []string{"nftables", "operation not supported", "Linux 5.13", "CONFIG_NF_TABLES", "another --mode"}}, // no nf_tables
		{unix.ENOENT, []string{"nftables", "make counter", "Linux 5.13"}},                                                      // no such expression
		{unix.EINVAL, []string{"nftables", "invalid argument", "Linux 5.13", "this is " + release}},                            // before 5.13
		{unix.EPERM, []string{"permission", "CAP_NET_ADMIN"}},
	} {
		d := nftables.Lacking(func(s nftables.Conn) nftables.Conn { return refusing{s, tt.err} })
		for _, trial := range []bool{false, true} {
			facts, err := d.Probe(t.Context(), plan.ModeNFTables, trial)
			if err != nil || facts.Missing == nil || facts.Capabilities[0].Supported {
				t.Fatalf("%v: %+v, %v", tt.err, facts, err)
			}
			for _, phrase := range tt.want {
				if !strings.Contains(facts.Missing.Error(), phrase) {
					t.Errorf("%v: %q doesn't say %q", tt.err, facts.Missing, phrase)
				}
			}
		}
	}
}

// TestProbeLeavesAccounting: to have the kernel check rules that count packets doesn't leave conntrack counting.
func TestProbeLeavesAccounting(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	facts, err := nftables.NewDriver("", false).Probe(t.Context(), plan.ModeNFTables, false)
	if n, ok := kernel.ReadSysctl("net", "netfilter", "nf_conntrack_acct"); err != nil || facts.Missing != nil || !ok || n != 0 {
		t.Errorf("nf_conntrack_acct is %d (%t) after %+v, %v", n, ok, facts, err)
	}
}

// forgetful is a kernel whose next list of many elements lacks some: a message of the list.
type forgetful struct {
	nftables.Conn
	lists *int // how many more lack some
}

func (f forgetful) Dump(request func([]byte) []byte, each func([]byte)) error {
	elements := request(nil)[4] == unix.NFT_MSG_GETSETELEM // the low byte of nlmsg_type
	messages := 0
	err := f.Conn.Dump(request, func(b []byte) {
		if messages++; elements && messages == 2 && *f.lists > 0 {
			*f.lists--
			return
		}
		each(b)
	})
	return err
}

// TestListsThatLackSome: the kernel may leave elements out of a list, while it enlarges the table of a set. That is no damage.
func TestListsThatLackSome(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := plane(kerneltest.Many(600, 3)...)
	n.program(p)
	lists := 0
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return forgetful{s, &lists} })
	look := func(lacking, want int) {
		t.Helper()
		run(t, "nft add table ip foreign; nft delete table ip foreign")
		lists = lacking
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) { // it takes pauses
			found, err := n.plane.Check(t.Context())
			if err != nil || len(found) > want || time.Now().After(deadline) {
				t.Fatalf("%d lists lack some: Check says %v, %v, and %d lists were whole; want %d findings", lacking, found, err, lists, want)
			}
			if len(found) == want && lists == 0 {
				return
			}
		}
	}
	look(0, 0)
	look(1, 0)
	run(t, "nft flush map ip kproxy backends")
	look(0, 1)
}
