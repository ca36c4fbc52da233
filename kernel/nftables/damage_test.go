package nftables_test

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// node is a node with nothing on it but the tables.
type node struct {
	t     *testing.T
	plane *nftables.Plane
	was   *plan.Plan
}

func newNode(t *testing.T) *node {
	kerneltest.Namespace(t)
	n := &node{t: t}
	n.restart()
	return n
}

// restart is a new process that finds what the last one left.
func (n *node) restart() {
	n.t.Helper()
	if n.plane != nil {
		nftables.Close(n.plane)
	}
	routing := steering.DefaultRouting()
	var err error
	if n.plane, err = nftables.Open(options(), &routing); err != nil {
		n.t.Fatal(err)
	}
	nftables.SweepAtOnce(n.plane)
	n.was = nil
}

// program has the kernel follow p, as the agent does, and returns what wrote the rules of services.
func (n *node) program(p *plan.Plan) kernel.Result {
	n.t.Helper()
	d := plan.Between(n.was, p)
	d.Full = n.was == nil
	n.was = p
	followed := n.plane.Follow(n.t.Context(), p, d)
	if followed.Err != nil {
		n.t.Fatal(followed.Err)
	}
	n.plane.Want(p, d)
	if r := n.sync(); followed.Holds == nil {
		return r
	}
	return followed
}

func (n *node) sync() kernel.Result {
	n.t.Helper()
	r := n.plane.Sync(n.t.Context(), func() {})
	if !r.OK() {
		n.t.Fatal(r.Err)
	}
	return r
}

// listing returns what nft lists of kproxy's tables, the routing rules, and the routes of kproxy's table.
func (n *node) listing() string {
	n.t.Helper()
	return run(n.t, "nft -s list table ip kproxy; nft -s list table ip6 kproxy; ip rule; ip route show table 10249")
}

func web(endpoints ...string) *plan.Service {
	return kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.NodePort(30080), kerneltest.Endpoints(endpoints...))
}

func TestDamageIsFoundAndMended(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := plane(web("10.1.0.1:80", "10.1.0.2:80"))
	n.program(p)
	if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
		t.Fatalf("nothing was damaged, and Check says %v, %v", found, err)
	}
	want := n.listing()
	for _, damage := range []string{
		"nft delete table ip kproxy",
		"nft flush ruleset",
		"nft flush chain ip kproxy services",
		"nft delete chain ip kproxy nat-postrouting",
		"nft flush map ip kproxy services; nft delete chain ip kproxy pick-2",
		"nft insert rule ip6 kproxy services accept",
		"nft delete element ip kproxy backends '{ 10.96.0.1 . tcp . 80 . 0x00000001 }'",
		"nft add element ip kproxy endpoints '{ 10.9.0.1 . tcp . 80 . 10.9.0.1 }'",
		"nft flush map ip kproxy services",
		"ip rule del pref 10249",
	} {
		run(t, "nft add table ip foreign; "+damage)
		time.Sleep(50 * time.Millisecond) // four times what the last look took
		found, err := n.plane.Check(t.Context())
		if err != nil || len(found) == 0 {
			t.Errorf("%s: Check says %v, %v", damage, found, err)
		}
		if _, err := n.plane.Damage(); err != nil {
			t.Errorf("%s: Damage says %v", damage, err)
		}
		if r := n.plane.Follow(t.Context(), p, plan.Delta{}); r.Err != nil {
			t.Fatal(r.Err)
		}
		n.sync()
		if now := n.listing(); sorted(now) != sorted(want) {
			t.Errorf("%s: after Sync:\n%s", damage, now)
		}
	}
}

// TestCheckAsksOnce: what a first pass has written to an empty kernel isn't read back, until another program changes something.
func TestCheckAsksOnce(t *testing.T) {
	t.Parallel()
	n, faults := newNode(t), &kerneltest.Faults{}
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { return faulty{s, faults} })
	n.program(plane(kerneltest.Many(5, 3)...))
	check := func() int {
		before := faults.Calls()
		if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
			t.Fatal(found, err)
		}
		return faults.Calls() - before
	}
	if calls := check(); calls != 1 {
		t.Errorf("%d requests", calls)
	}
	if err := n.plane.Alive(time.Hour); err != nil {
		t.Fatal(err)
	}
	if calls := check(); calls != 1 {
		t.Errorf("%d requests after a heartbeat", calls)
	}
	run(t, "nft add table ip another")
	if calls := check(); calls < 2 {
		t.Errorf("%d requests after another program's transaction", calls)
	}
}

// interrupted is a kernel while whose first list something else happens.
type interrupted struct {
	nftables.Conn
	first func()
}

func (i interrupted) Dump(request func([]byte) []byte, each func([]byte)) error {
	i.first()
	return i.Conn.Dump(request, each)
}

// TestHeartbeatWhileElementsAreRead: it doesn't wait for a list, which may be one of millions.
func TestHeartbeatWhileElementsAreRead(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program(plane(kerneltest.Many(5, 3)...))
	lists := 0
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn {
		return interrupted{s, sync.OnceFunc(func() {
			lists++
			beat := make(chan error, 1)
			go func() { beat <- n.plane.Alive(time.Hour) }()
			select {
			case err := <-beat:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(10 * time.Second):
				t.Error("the heartbeat waits")
			}
		})}
	})
	run(t, "nft add table ip another")
	if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 || lists != 1 {
		t.Errorf("Check says %v, %v, after %d lists", found, err, lists)
	}
}

// TestAnotherTableInItsPlace: where another program replaces kproxy's table by one of its own, that stays, kproxy says
// what to do, and makes its own again when there is room.
func TestAnotherTableInItsPlace(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := plane(web("10.1.0.1:80", "10.1.0.2:80"))
	n.program(p)
	want := n.listing()
	run(t, "nft delete table ip kproxy; nft add table ip kproxy; nft add chain ip kproxy theirs")
	theirs := run(t, "nft list table ip kproxy")
	if found, err := n.plane.Check(t.Context()); err != nil || len(found) == 0 {
		t.Errorf("Check says %v, %v", found, err)
	}
	for range 2 {
		if r := n.plane.Sync(t.Context(), func() {}); r.Err == nil || !strings.Contains(r.Err.Error(), "nft delete table ip kproxy") {
			t.Errorf("Sync says %v", r.Err)
		}
		if now := run(t, "nft list table ip kproxy"); now != theirs {
			t.Fatalf("their table became\n%s", now)
		}
	}
	run(t, "nft delete table ip kproxy")
	if _, err := n.plane.Damage(); err != nil {
		t.Error(err)
	}
	if r := n.plane.Follow(t.Context(), p, plan.Delta{}); r.Err != nil {
		t.Fatal(r.Err)
	}
	n.sync()
	if now := n.listing(); sorted(now) != sorted(want) {
		t.Errorf("afterwards:\n%s", now)
	}
}

// sorted leaves the order of elements out of account.
func sorted(listing string) string {
	words := strings.FieldsFunc(listing, func(r rune) bool { return r == '\n' || r == ',' || r == '{' || r == '}' })
	for i := range words {
		words[i] = strings.TrimSpace(words[i])
	}
	slices.Sort(words)
	return strings.Join(words, "\n")
}

func TestOthersAreLeftAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program(plane(web("10.1.0.1:80")))
	for range 3 {
		run(t, "nft add table ip foreign; nft add chain ip foreign x; nft delete table ip foreign")
		if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
			t.Errorf("others' changes are taken for damage: %v, %v", found, err)
		}
	}
}

func TestAdoption(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	stays := kerneltest.Service("stays", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.InUserspace)
	p := plane(web("10.1.0.1:80", "10.1.0.2:80"), stays)
	p.Find(web().Port.Key).KernelHash = 7
	n.program(p)
	want := n.listing()
	n.restart()
	n.plane.Want(p, plan.Between(nil, p))
	var b service.Builder
	for _, s := range p.Services {
		port := *s.Port
		port.Number, port.ClusterIPs = 80, []netip.Addr{s.Frontends[0].Address.Addr()}
		if err := b.AddPort(port); err != nil {
			t.Fatal(err)
		}
	}
	adopted, err := n.plane.Adopt(t.Context(), b.Build())
	if want := map[service.Key]bool{web().Port.Key: true}; err != nil || !maps.Equal(adopted, want) {
		t.Errorf("Adopt = %v, %v; want what was offloaded, %v", adopted, err, want)
	}
	if got := n.plane.Programmed(); got[web().Port.Key] != 7 {
		t.Errorf("Programmed = %v after a restart", got)
	}
	n.program(p)
	if now := n.listing(); sorted(now) != sorted(want) {
		t.Errorf("a restart changed what is programmed:\n%s", now)
	}
	// A table of another layout is replaced.
	tableOf := func(comment string) {
		run(t, "nft delete table ip kproxy\nnft -f - <<END\nadd table ip kproxy { comment \""+comment+"\"; }\nEND\nnft add map ip kproxy services '{ type ipv4_addr : verdict; }'")
	}
	tableOf("kproxy, layout 0")
	n.restart()
	n.program(p)
	if now := n.listing(); sorted(now) != sorted(want) {
		t.Errorf("the table of another release isn't replaced:\n%s", now)
	}
	// A table that another program made stays, and the error says what to do about it.
	tableOf("another's")
	theirs := run(t, "nft list table ip kproxy")
	d := nftables.NewDriver("", false)
	facts, err := d.Probe(t.Context(), plan.ModeNFTables, false)
	if err != nil || facts.Missing == nil || !strings.Contains(facts.Missing.Error(), "nft delete table ip kproxy") {
		t.Errorf("with another program's table: %v, %v", facts.Missing, err)
	}
	if _, err := d.Preview(t.Context(), 0); err != nil {
		t.Error(err)
	}
	if err := d.Remove(t.Context(), 0); err != nil {
		t.Error(err)
	}
	if now := run(t, "nft list table ip kproxy"); now != theirs {
		t.Errorf("another program's table became\n%s", now)
	}
}

// TestWalk: random plans, one after the other, lead where each does by itself; and doing
// it again changes nothing.
func TestWalk(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	walk := kerneltest.NewWalk(3, plan.ModeNFTables, plan.NFTables, 12)
	for step := range 60 {
		p := walk.Next()
		n.program(p)
		if step%6 > 0 {
			continue
		}
		got := n.listing()
		r := n.plane
		if r.Want(p, plan.Delta{}); step%12 == 0 {
			if x := r.Sync(t.Context(), func() {}); !x.OK() || x.Tried {
				t.Fatalf("step %d: a second pass did something: %+v", step, x)
			}
		}
		run(t, "nft flush ruleset")
		n.restart()
		n.program(p)
		if want := n.listing(); sorted(got) != sorted(want) {
			t.Fatalf("step %d: changes led to\n%s\nwhere a fresh start leads to\n%s", step, got, want)
		}
	}
}

// TestChainInUseIsWrittenAgain: a chain that can't be deleted, as kernels before 6.2 refuse for a
// moment, is emptied. The service that needs it next finds its rules there.
func TestChainInUseIsWrittenAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	two, three := plane(web("10.1.0.1:80", "10.1.0.2:80")), plane(web("10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80"))
	n.program(two)
	of2 := func() string { return run(t, "nft -s list chain ip kproxy pick-2") }
	want := of2()
	run(t, "nft add chain ip kproxy user; nft add rule ip kproxy user jump pick-2")
	n.program(three)
	if of2() == want {
		t.Fatal("the chain that is used no more was left alone")
	}
	n.program(two)
	if got := of2(); got != want {
		t.Errorf("chain pick-2 is\n%s\nwant\n%s", got, want)
	}
}

// TestChainIsKeptForAWhile: a chain that no service uses any more is there for the next that
// does, which then costs no rule; and it goes once it was kept for long enough, also where
// nothing changes any more.
func TestChainIsKeptForAWhile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	two, three := plane(web("10.1.0.1:80", "10.1.0.2:80")), plane(web("10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80"))
	nftables.KeepSpare(n.plane)
	n.program(two)
	n.program(three)
	if r := n.program(two); r.Applied.Chains != 0 || r.Applied.Entries == 0 {
		t.Errorf("a change back wrote %+v", r.Applied)
	}
	run(t, "nft list chain ip kproxy pick-3")
	nftables.SweepAtOnce(n.plane)
	if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("a check found %v, %v", found, err)
	}
	if out := run(t, "nft -t list table ip kproxy"); strings.Contains(out, "chain pick-3 ") || !strings.Contains(out, "chain pick-2 ") {
		t.Errorf("the chain that wasn't needed any more is still there, or the one that is isn't:\n%s", out)
	}
}

// TestTablesOfAnotherRelease: they are replaced, and nothing that they held is taken to be there.
func TestTablesOfAnotherRelease(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := plane(kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.InUserspace))
	run(t, `nft -f - <<END
table ip kproxy {
	comment "kproxy, layout 0"
	set userspace {
		type ipv4_addr . inet_proto . inet_service
		elements = { 10.96.0.1 . tcp . 80 }
	}
}
END`)
	n.program(p)
	got := n.listing()
	run(t, "nft flush ruleset")
	n.restart()
	n.program(p)
	if want := n.listing(); sorted(got) != sorted(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestKeepConnectionsOfOneSocket: a client may have connections from one port to two of a
// service's; both are the same element.
func TestKeepConnectionsOfOneSocket(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program(plane(web("10.1.0.1:80")))
	a := netip.MustParseAddrPort
	both := []kernel.Redirected{{Client: a("192.0.2.1:5000"), Address: a("10.96.0.1:80")}, {Client: a("192.0.2.1:5000"), Address: a("10.96.0.1:443")}}
	for range 2 {
		if err := n.plane.KeepConnections(time.Minute, both); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEndpointsOfOneNumber: two endpoints whose addresses have the same hash don't keep a
// service with affinity out.
func TestEndpointsOfOneNumber(t *testing.T) {
	t.Parallel()
	seen := map[uint32]netip.AddrPort{}
	random := rand.New(rand.NewPCG(1, 2))
	for {
		b := [16]byte{0: 0xfd}
		binary.BigEndian.PutUint64(b[8:], random.Uint64())
		e, h := netip.AddrPortFrom(netip.AddrFrom16(b), 80), fnv.New32a()
		_, _ = h.Write(append(b[:], 0, 80))
		number := h.Sum32() | 1<<31
		if other, is := seen[number]; is {
			n := newNode(t)
			n.program(plane(kerneltest.Service("web", service.TCP, kerneltest.Cluster("[fd00:96::1]:80"), kerneltest.Affinity(time.Hour), kerneltest.Endpoints(other.String(), e.String()))))
			return
		}
		seen[number] = e
	}
}

// TestAnySourceRangesAreTaken: memberships are one transaction, so that an element which the kernel refuses would keep all
// of them from following. Source ranges are the only ones that could contradict each other: whichever a service has, nested, twice,
// side by side or of every address, and whichever it had before, the kernel takes them.
func TestAnySourceRangesAreTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	random := rand.New(rand.NewPCG(5, 6))
	some := func(within netip.Prefix) (out []netip.Prefix) {
		for range random.IntN(8) {
			a := within.Addr().AsSlice()
			a[len(a)-1], a[len(a)-2] = byte(random.IntN(4)<<6|random.IntN(4)), byte(random.IntN(2))
			at, _ := netip.AddrFromSlice(a)
			out = append(out, netip.PrefixFrom(at, max(0, at.BitLen()-random.IntN(18))))
			if random.IntN(30) == 0 {
				out = append(out, netip.PrefixFrom(at, 0))
			}
		}
		return out
	}
	limited := func(f *plan.Frontend) {
		f.SourceRanges = slices.Concat(some(netip.MustParsePrefix("192.0.2.0/24")), some(netip.MustParsePrefix("2001:db8::/64")))
	}
	var p *plan.Plan
	for range 150 {
		p = plane(
			kerneltest.Service("one", service.TCP, kerneltest.LoadBalancer("198.51.100.1:80", limited), kerneltest.LoadBalancer("[2001:db8:1::1]:80", limited), kerneltest.Endpoints("10.1.0.1:80", "[fd00::1]:80")),
			kerneltest.Service("two", service.TCP, kerneltest.LoadBalancer("198.51.100.1:81", limited), kerneltest.Endpoints("10.1.0.1:80")))
		n.program(p)
	}
	got := n.listing()
	run(t, "nft flush ruleset")
	n.restart()
	n.program(p)
	if diff := cmp.Diff(lines(n.listing()), lines(got)); diff != "" {
		t.Errorf("(-from a fresh start +got):\n%s", diff)
	}
}

// TestPacketsBetweenTransactions: a packet that meets the elements of two transactions, so that there is
// no endpoint of its number, is dropped, and its client's next packet served. Conntrack remembers nothing
// of it, or that one would go where the first went, to nowhere.
func TestPacketsBetweenTransactions(t *testing.T) {
	t.Parallel()
	onEachFamily(t, func(s *scene) {
		for _, more := range []func(*plan.Service){func(*plan.Service) {}, kerneltest.Affinity(time.Hour)} {
			p := plane(kerneltest.Service("web", service.TCP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2), more))
			s.program(p)
			run(t, "nft flush map "+map[service.Family]string{service.IPv4: "ip", service.IPv6: "ip6"}[s.Family]+" kproxy backends")
			dial := make(chan error, 1)
			go s.On(1, func() {
				c, err := net.DialTimeout("tcp", s.Virtual(1), 20*time.Second)
				if err == nil {
					err = c.Close()
				}
				dial <- err
			})
			time.Sleep(300 * time.Millisecond)
			s.open() // reads the damage, and mends it
			s.program(p)
			if err := <-dial; err != nil {
				s.T.Error(err)
			}
		}
	})
}

// withoutFlowtables is a kernel in which flowtables do nothing, and one of whose devices can't be in any.
type withoutFlowtables struct {
	nftables.Conn
	odd   string
	added map[string]bool // devices
}

func (w withoutFlowtables) Transaction(subsystem uint16, requests [][]byte) error {
	var left [][]byte
	for i, b := range requests {
		kind := binary.NativeEndian.Uint16(b[4:]) & 0xff
		switch {
		case kind == unix.NFT_MSG_NEWFLOWTABLE && bytes.Contains(b, []byte(w.odd+"\x00")):
			return &netlink.RequestError{Index: i, Err: unix.EOPNOTSUPP}
		case kind == unix.NFT_MSG_NEWFLOWTABLE:
			for _, d := range []string{"one", "two"} {
				w.added[d] = w.added[d] || bytes.Contains(b, []byte(d+"\x00"))
			}
		case kind == unix.NFT_MSG_DELFLOWTABLE:
		case bytes.Contains(b, []byte("flow_offload")): // a rule that says nothing is in its place
			const header = unix.NLMSG_HDRLEN + netlink.SizeofNetfilter
			bare := bytes.Clone(b[:header])
			for typ, v := range netlink.Attributes(b[header:]) {
				if typ == unix.NFTA_RULE_TABLE || typ == unix.NFTA_RULE_CHAIN {
					bare = netlink.Append(bare, typ, v...)
				}
			}
			left = append(left, bare)
		default:
			left = append(left, b)
		}
	}
	if len(left) == 0 {
		return nil
	}
	return w.Conn.Transaction(subsystem, left)
}

// TestADeviceThatIsRefusedStopsNothing: neither that other devices are followed, nor the search for damage; and it is told once.
func TestADeviceThatIsRefusedStopsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	o, routing := options(), steering.DefaultRouting()
	o.Flowtable = true
	nftables.Close(n.plane)
	var err error
	if n.plane, err = nftables.Open(o, &routing); err != nil {
		t.Fatal(err)
	}
	kernel := withoutFlowtables{odd: "odd", added: map[string]bool{}}
	nftables.Through(n.plane, func(s nftables.Conn) nftables.Conn { kernel.Conn = s; return kernel })
	n.program(plane(kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.1.1:80"), kerneltest.Endpoints("10.1.0.1:80"))))
	run(t, "ip link add one type veth peer name odd && ip link add two type veth peer name three; ip link set one up; ip link set odd up; ip link set two up; nft add rule ip kproxy services accept")
	if found, err := n.plane.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "without device odd:") || len(found) == 0 {
		t.Errorf("Check says %v, %v", found, err)
	}
	if !kernel.added["one"] || !kernel.added["two"] {
		t.Errorf("devices in the flowtables: %v", kernel.added)
	}
	n.sync()
	_, _ = n.plane.Check(t.Context()) // of the flowtables that were made anew
	if found, err := n.plane.Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("once more, Check says %v, %v", found, err)
	}
}
