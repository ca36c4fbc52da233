package nftables

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// layout is the comment of a table. One that begins as those of an owner was made by another release,
// and is replaced as a whole; one with another comment, or none, isn't kproxy's.
const layout = owner + "layout 2"

const owner = "kproxy, "

// maker says whose a table of kproxy's name is.
type maker int

const (
	absent  maker = iota
	another       // program's
	old           // of another release of kproxy
	current
)

// spare is how long a chain is kept that no service uses any more: an endpoint that comes and
// goes has a service use two in turn. When a rule that looks something up in a map is added
// to a new chain, the kernel goes through all of the map (nf_tables_bind_set in
// net/netfilter/nf_tables_api.c), which takes ten milliseconds and more for 100,000 endpoints.
const spare = time.Minute

// tables are kproxy's two tables in the kernel. They are safe for concurrent use.
type tables struct {
	families []service.Family

	mu      sync.Mutex // guards what follows
	socket  conn
	sets    [2]map[string]*Set
	chains  [2]map[string]code      // what was written
	stale   [2]map[string]time.Time // chains that aren't used any more, since when
	spare   time.Duration           // how long they are kept
	entries map[place]int           // how many elements the kernel has of sets that follow plans; keys are empty
	listed  [2]map[string]listed    // chains as the kernel gave them back when they had been written
	devices map[string]int          // of the flowtables, by name: their indices
	// unfollowed are devices that the flowtables lack, until it has been told.
	unfollowed error
	at         uint32 // generation after the last transaction that was noticed
	foreign    int    // how often others' transactions were noticed

	// The heartbeat has a socket and a lock of its own: mu is held while all elements are written or
	// read, which may take longer than a beat lives. Where both are locked, mu is first.
	pulse sync.Mutex // guards what follows
	heart conn
	beats uint32 // its transactions since at
}

// conn is a [netlink.Socket], or one with faults.
type conn interface {
	netlink.Requester
	netlink.Dumper
	Transaction(subsystem uint16, requests [][]byte) error
	Refusals(subsystem uint16, requests [][]byte) ([]netlink.RequestError, error)
	Close() error
}

// code is the expressions of a chain's rules, and how many rules there are.
type code struct {
	text  string
	rules int
}

// listed is a chain as the kernel lists it, in bytes that are the same as long as it is
// left alone.
type listed code

// openTables opens a socket in the network namespace of the calling thread. It changes nothing.
func openTables(families []service.Family) (*tables, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 64<<10)
	if err != nil {
		return nil, err
	}
	heart, err := netlink.Open(unix.NETLINK_NETFILTER, 4<<10)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	t := &tables{families: families, socket: s, heart: heart, spare: spare, entries: map[place]int{}}
	for _, f := range families {
		t.sets[f], t.chains[f], t.stale[f], t.listed[f] = map[string]*Set{}, map[string]code{}, map[string]time.Time{}, map[string]listed{}
		for _, s := range sets(f) {
			t.sets[f][s.Name] = &s
		}
	}
	return t, nil
}

func (t *tables) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pulse.Lock()
	defer t.pulse.Unlock()
	return errors.Join(t.socket.Close(), t.heart.Close())
}

// use notes whether a chain is in use.
func (t *tables) use(f service.Family, name string, is bool) {
	if is {
		delete(t.stale[f], name)
	} else if _, already := t.stale[f][name]; !already {
		t.stale[f][name] = time.Now()
	}
}

// ensure makes the tables with their sets, where they aren't there. Without chains they
// do nothing.
func (t *tables) ensure() error {
	requests, err := t.setUp()
	if err == nil {
		err = t.commit(requests)
	}
	return err
}

// setUp are the requests for that.
func (t *tables) setUp() (requests [][]byte, _ error) {
	for _, f := range t.families {
		found, err := t.find(f)
		switch {
		case err != nil:
			return nil, err
		case found == another:
			return nil, fmt.Errorf("nftables table %s %s isn't kproxy's, which has a comment that begins with %q; "+
				"rename it, or remove it with nft delete table %[1]s %[2]s", nfWord(f), Name, owner)
		case found == old:
			requests = append(requests, deleteTable(f))
		}
		requests = append(requests, newTable(f, layout))
		for _, c := range counters {
			requests = append(requests, newCounter(f, c))
		}
		for i, s := range sets(f) {
			requests = append(requests, newSet(f, &s, uint32(i+1)))
		}
	}
	return requests, nil
}

// find says which table of kproxy's name family f has.
func (t *tables) find(f service.Family) (found maker, err error) {
	err = t.dump(unix.NFT_MSG_GETTABLE, f, nil, func(b []byte) {
		switch about := userdataText(attribute(b, tableUserdata)); {
		case netlink.Text(attribute(b, unix.NFTA_TABLE_NAME)) != Name:
		case about == layout:
			found = current
		case strings.HasPrefix(about, owner):
			found = old
		default:
			found = another
		}
	})
	return found, err
}

// dump lists objects of family f; each gets their attributes.
func (t *tables) dump(kind uint16, f service.Family, more func([]byte) []byte, each func([]byte)) error {
	if err := netlink.ListNFTables(t.socket, kind, f.Number(), more, func(_ uint8, b []byte) { each(b) }); err != nil {
		return fmt.Errorf("list nftables: %w", classify(err))
	}
	return nil
}

// classify tells callers what they can act on.
func classify(err error) error {
	if errors.Is(err, unix.EPERM) {
		return errors.Join(kernel.ErrPermission, err)
	}
	return err
}

// commit carries out a transaction, and notices others'.
func (t *tables) commit(requests [][]byte) error {
	if len(requests) == 0 {
		return nil
	}
	if err := t.notice(0); err != nil {
		return err
	}
	if err := t.socket.Transaction(unix.NFNL_SUBSYS_NFTABLES, requests); err != nil {
		return classify(requestError(requests, err))
	}
	return t.notice(1)
}

// requestError says which request an error is about, if it is about one.
func requestError(requests [][]byte, err error) error {
	var at *netlink.RequestError
	if errors.As(err, &at) && at.Index >= 0 && at.Index < len(requests) {
		what, name := about(requests[at.Index])
		return &refusal{what + " " + name, at.Err}
	}
	return err
}

// refusal is a request that the kernel refused.
type refusal struct {
	request string // what it was to do
	err     error
}

func (r *refusal) Error() string { return r.request + ": " + r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// refused reports whether err is about what a transaction was to change, so that another may
// succeed.
func refused(err error) bool {
	var r *refusal
	return errors.As(err, &r) && !slices.ContainsFunc([]unix.Errno{unix.EPERM, unix.EACCES, unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN},
		func(e unix.Errno) bool { return errors.Is(err, e) })
}

// beat carries out a transaction of the heartbeat's. The caller doesn't hold mu.
func (t *tables) beat(requests [][]byte) error {
	t.pulse.Lock()
	defer t.pulse.Unlock()
	if err := t.heart.Transaction(unix.NFNL_SUBSYS_NFTABLES, requests); err != nil {
		return classify(requestError(requests, err))
	}
	t.beats++
	return nil
}

// notice looks whether there were other transactions than so many of kproxy's own, and the heartbeat's, since
// the last time.
func (t *tables) notice(own uint32) error {
	t.pulse.Lock()
	defer t.pulse.Unlock()
	now, err := t.generation()
	if err != nil {
		return err
	}
	if now != t.at+own+t.beats {
		t.foreign++
	}
	t.at, t.beats = now, 0
	return nil
}

// disturbances returns how often others' transactions were noticed until now.
func (t *tables) disturbances() int {
	_ = t.notice(0) // what can't be asked now fails later
	return t.foreign
}

// about says what a request does, and the name of the chain, set or object that it does it to.
func about(b []byte) (what, name string) {
	kind := binary.NativeEndian.Uint16(b[4:]) & 0xff
	what = map[uint16]string{unix.NFT_MSG_NEWTABLE: "make table", unix.NFT_MSG_DELTABLE: "delete table", unix.NFT_MSG_NEWCHAIN: "make chain", unix.NFT_MSG_DELCHAIN: "delete chain", unix.NFT_MSG_NEWRULE: "add rule to", unix.NFT_MSG_DELRULE: "flush", unix.NFT_MSG_NEWSET: "make set", unix.NFT_MSG_NEWSETELEM: "add to set", unix.NFT_MSG_DELSETELEM: "delete from set", unix.NFT_MSG_NEWOBJ: "make counter", unix.NFT_MSG_NEWFLOWTABLE: "make flowtable"}[kind]
	for typ, v := range netlink.Attributes(b[unix.NLMSG_HDRLEN+netlink.SizeofNetfilter:]) {
		if typ == 2 || typ == unix.NFTA_CHAIN_NAME && (kind == unix.NFT_MSG_NEWCHAIN || kind == unix.NFT_MSG_DELCHAIN) {
			return what, netlink.Text(v)
		}
	}
	return what, ""
}

// generation returns how many transactions the kernel has carried out, whosever they were.
func (t *tables) generation() (uint32, error) {
	out, err := netlink.Generation(t.socket)
	if err != nil {
		return 0, fmt.Errorf("read nftables' generation: %w", classify(err))
	}
	return out, nil
}

// elements reads sets back.
func (t *tables) elements(names ...string) (map[place]Element, error) {
	out := map[place]Element{}
	for _, f := range t.families {
		for _, name := range names {
			err := t.dump(unix.NFT_MSG_GETSETELEM, f, func(b []byte) []byte {
				b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_TABLE, Name)
				return netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, name)
			}, func(b []byte) {
				readElements(b, func(e Element) { out[place{f, name, e.Key}] = e })
			})
			if errors.Is(err, unix.ENOENT) {
				continue
			} else if err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// lackingTwice looks what the kernel has otherwise than it should, and again where it seems to lack elements: a list of
// many that is made while it enlarges the set's table lacks some (nft_rhash_walk in net/netfilter/nft_set_hash.c),
// and nothing tells. Those are lacking that both lists lack.
func lackingTwice(look func() (difference, error)) (difference, error) {
	first, err := look()
	if err != nil || len(first.come) == 0 {
		return first, err
	}
	lacking := map[place]bool{}
	for i := range first.come {
		lacking[first.come[i].place()] = true
	}
	d, err := look()
	d.come = slices.DeleteFunc(d.come, func(m member) bool { return !lacking[m.place()] })
	return d, err
}

// place says where an element is.
type place struct {
	family service.Family
	set    string
	key    string
}

// readRules lists the chains.
func (t *tables) readRules() (out [2]map[string]listed, err error) {
	for _, f := range t.families {
		out[f] = map[string]listed{}
		err = t.dump(unix.NFT_MSG_GETCHAIN, f, nil, func(attributes []byte) {
			if netlink.Text(attribute(attributes, unix.NFTA_CHAIN_TABLE)) == Name {
				out[f][netlink.Text(attribute(attributes, unix.NFTA_CHAIN_NAME))] = listed{}
			}
		})
		rules := map[string]*strings.Builder{}
		if err == nil {
			err = t.dump(unix.NFT_MSG_GETRULE, f, func(b []byte) []byte { return netlink.AppendText(b, unix.NFTA_RULE_TABLE, Name) }, func(attributes []byte) {
				if netlink.Text(attribute(attributes, unix.NFTA_RULE_TABLE)) != Name {
					return
				}
				c := netlink.Text(attribute(attributes, unix.NFTA_RULE_CHAIN))
				if rules[c] == nil {
					rules[c] = &strings.Builder{}
				}
				rules[c].Write(attributes)
				out[f][c] = listed{rules: out[f][c].rules + 1}
			})
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return out, err
		}
		for c, b := range rules {
			out[f][c] = listed{b.String(), out[f][c].rules}
		}
	}
	return out, nil
}

// writeChains returns the requests that make chains what they should be, where they
// aren't. What was written before is taken to be there.
func (t *tables) writeChains(f service.Family, want []Chain) (requests [][]byte, written map[string]code, rules int) {
	var fill [][]byte
	written = map[string]code{}
	for i := range want {
		c := &want[i]
		var text strings.Builder
		for j := range c.Rules {
			text.Write(c.Rules[j].Expressions)
			text.WriteByte(0)
		}
		now := code{text.String(), len(c.Rules)}
		was, known := t.chains[f][c.Name]
		if _, twice := written[c.Name]; twice || known && was == now {
			continue
		}
		written[c.Name] = now
		requests = append(requests, newChain(f, c))
		fill = append(fill, flushChain(f, c.Name))
		for j := range c.Rules {
			fill = append(fill, newRule(f, c.Name, &c.Rules[j]))
			rules++
		}
	}
	return append(requests, fill...), written, rules
}

// difference lists the elements that a transaction removes from sets and adds to them.
type difference struct {
	gone, come []member
	touched    [2][]treatment // of services that change
}

func (d *difference) requests(t *tables) [][]byte {
	return append(bySet(d.gone).requests(t, unix.NFT_MSG_DELSETELEM, whole), bySet(d.come).requests(t, unix.NFT_MSG_NEWSETELEM, whole)...)
}

// cutSteering takes from d what is of steering's sets.
func (d *difference) cutSteering() (out difference) {
	cut := func(from, to *[]member) {
		*from = slices.DeleteFunc(*from, func(m member) bool {
			is := slices.Contains(steeringSets, m.set)
			if is {
				*to = append(*to, m)
			}
			return is
		})
	}
	cut(&d.gone, &out.gone)
	cut(&d.come, &out.come)
	return out
}

func whole(_ place, here []int32) []int32 { return here }

// grouped are members by their sets.
type grouped struct {
	list []member
	at   map[place][]int32 // indices in list
}

func bySet(list []member) grouped {
	g := grouped{list, map[place][]int32{}}
	for i := range list {
		set := list[i].setPlace()
		g.at[set] = append(g.at[set], int32(i))
	}
	return g
}

// requests change those elements that part leaves of each set's.
func (g grouped) requests(t *tables, kind uint16, part func(set place, here []int32) []int32) (out [][]byte) {
	for _, f := range t.families {
		for _, s := range sets(f) { // in a fixed order
			set := place{family: f, set: s.Name}
			if here := part(set, g.at[set]); len(here) > 0 {
				out = append(out, changeElements(f, kind, &s, len(here), func(i int) *Element { return &g.list[here[i]].Element })...)
			}
		}
	}
	return out
}

// fill puts the first elements into sets that have none, and carries out requests before them. What services lead to comes first, in
// transactions of which each ends where the kernel enlarges a set's table, when it is three quarters full: it does so in the
// background, and what is inserted meanwhile takes several times as long (rhashtable_insert_slow in lib/rhashtable.c).
func (t *tables) fill(requests [][]byte, come []member) error {
	const small = 3 << 10   // three quarters of a table of 4096
	const large = 256 << 10 // the kernel has the heartbeat wait for a transaction: this takes it a fraction of a second
	g, done := bySet(come), map[place]int{}
	for to := small + 1; ; to += min(to-1, large) {
		piece := g.requests(t, unix.NFT_MSG_NEWSETELEM, func(set place, here []int32) []int32 {
			if set.set == setServices || len(here) <= to {
				return nil
			}
			from := done[set]
			done[set] = to
			return here[from:to]
		})
		if len(piece) == 0 {
			break
		}
		if err := t.commit(append(requests, piece...)); err != nil {
			return err
		}
		requests = nil
	}
	return t.commit(append(requests, g.requests(t, unix.NFT_MSG_NEWSETELEM, func(set place, here []int32) []int32 { return here[done[set]:] })...))
}

// setPlace is its set, as a place without a key.
func (m *member) setPlace() place { return place{family: m.family, set: m.set} }

func (m *member) place() place { return place{m.family, m.set, m.Key} }

func (p place) compare(o place) int {
	return cmp.Or(cmp.Compare(p.family, o.family), strings.Compare(p.set, o.set), strings.Compare(p.key, o.key))
}

// scope describes the sets that follow plans: all of them, or those of steering.
type scope struct {
	names    []string
	services bool // those of services too

	plan       *plan.Plan           // whose elements the kernel holds; nil if that isn't known
	sizes      map[place]int        // how many there are; keys are empty
	counts     map[common]int32     // how many services want an element of a set that they share
	treatments [2]map[treatment]int // those in use, and how often
}

func newScope(services bool) *scope {
	s := &scope{names: steeringSets, services: services}
	if services {
		s.names = slices.Concat(steeringSets, serviceSets)
	}
	s.begin()
	return s
}

// sharedSets lists the sets in which several services may have the same element.
var sharedSets = []string{setEndpoints, setLeaving, setClusterIP, setLeft}

func shared(set string) bool { return slices.Contains(sharedSets, set) }

// common is an element of those. There is one for every endpoint, so it is small, and without pointers that
// would keep all that was allocated with its key, and that the garbage collector would follow.
type common struct {
	address  [16]byte
	port     [2]byte
	protocol byte
	set      byte // of sharedSets
}

func (m *member) common() common {
	n := typeAddr[m.family].size
	a, _ := netip.AddrFromSlice([]byte(m.Key[:n]))
	c := common{address: a.As16(), set: byte(slices.Index(sharedSets, m.set))}
	if m.set != setClusterIP {
		port := m.Key[n+registerAlign:]
		c.port, c.protocol = [2]byte{port[0], port[1]}, m.Key[n]
	}
	return c
}

// add adds what a service wants, with or without the elements of its rules.
func (m *members) add(x *plan.Service, rules bool) {
	m.addSteering(x)
	if rules {
		m.addService(x)
	}
}

// of returns what a service wants, sorted, each element once.
func (s *scope) of(f []service.Family, x *plan.Service, rules bool) (m members) {
	m.add(x, rules)
	m.unique(f)
	return m
}

// unique leaves out other families, and what is there twice. It sorts.
func (m *members) unique(f []service.Family) {
	if len(f) < len(service.Families) {
		m.list = slices.DeleteFunc(m.list, func(e member) bool { return !slices.Contains(f, e.family) })
	}
	slices.SortFunc(m.list, func(a, b member) int { return a.place().compare(b.place()) })
	m.list = slices.CompactFunc(m.list, func(a, b member) bool { return a.place() == b.place() })
}

// begin forgets everything.
func (s *scope) begin() {
	s.plan, s.counts, s.sizes = nil, map[common]int32{}, map[place]int{}
	for _, f := range service.Families {
		for _, name := range s.names {
			s.sizes[place{family: f, set: name}] = 0
		}
	}
	for f := range s.treatments {
		s.treatments[f] = map[treatment]int{}
	}
}

// count changes how many services want what m has. It leaves those elements of list that
// some service wanted before, or still wants.
func (s *scope) count(m *members, by int32) {
	s.countTreatments(m, int(by))
	m.list = slices.DeleteFunc(m.list, func(e member) bool {
		if !shared(e.set) {
			return false
		}
		c := e.common()
		was := s.counts[c]
		if s.counts[c] = was + by; was+by == 0 {
			delete(s.counts, c)
		}
		return was != 0 && was+by != 0
	})
}

func (s *scope) countTreatments(m *members, by int) {
	for f := range m.treatments {
		for _, t := range m.treatments[f] {
			if s.treatments[f][t] += by; s.treatments[f][t] == 0 {
				delete(s.treatments[f], t)
			}
		}
	}
}

// change returns what leads from the elements of the plan that the kernel holds to those
// of p, between which lies d. The kernel has no rules of what is in without.
func (s *scope) change(f []service.Family, d plan.Delta, without map[service.Key]error) (out difference) {
	var gone, come members
	for _, c := range d.Changes {
		was, is := s.of(f, c.Was, c.Rules() && without[c.Key()] == nil), s.of(f, c.Is, c.Rules())
		come.treatments = joined(come.treatments, is.treatments)
		gone.treatments = joined(gone.treatments, was.treatments)
		for i, j := range service.Merge(len(was.list), len(is.list), func(i, j int) int { return was.list[i].place().compare(is.list[j].place()) }) {
			switch {
			case j < 0:
				gone.list = append(gone.list, was.list[i])
			case i < 0:
				come.list = append(come.list, is.list[j])
			case !was.list[i].same(&is.list[j].Element):
				gone.list, come.list = append(gone.list, was.list[i]), append(come.list, is.list[j])
			}
		}
	}
	s.count(&come, 1) // first, so that an element which moves from one service to another stays
	s.count(&gone, -1)
	for i := range gone.list {
		s.sizes[gone.list[i].setPlace()]--
	}
	for i := range come.list {
		s.sizes[come.list[i].setPlace()]++
	}
	return difference{gone.list, come.list, joined(come.treatments, gone.treatments)}
}

func joined(a, b [2][]treatment) [2][]treatment {
	for f := range a {
		a[f] = append(a[f], b[f]...)
	}
	return a
}

// whole returns what leads from what the kernel has to the elements of p, but those of the rules of
// services in without.
func (s *scope) whole(f []service.Family, have map[place]Element, p *plan.Plan, without map[service.Key]error) (out difference) {
	s.begin()
	var m members
	endpoints, room := 0, 0
	for _, x := range p.Services {
		n := len(x.Groups[0].Cluster) + len(x.Groups[1].Cluster)
		endpoints += n
		room += len(x.Frontends) * (1 + 2*n)
	}
	if s.services {
		s.counts = make(map[common]int32, endpoints)
	}
	out.come = make([]member, 0, max(0, room-len(have)))
	for _, x := range p.Services {
		m.list, m.treatments = m.list[:0], [2][]treatment{m.treatments[0][:0], m.treatments[1][:0]}
		if m.add(x, s.services && without[x.Port.Key] == nil); len(x.Frontends) > 1 || x.Port.Affinity > 0 || len(f) < len(service.Families) || slices.ContainsFunc(x.Frontends, func(f plan.Frontend) bool { return f.ShortCircuit }) {
			m.unique(f) // else it is
		}
		s.countTreatments(&m, 1)
		for i := range m.list {
			e := &m.list[i]
			if shared(e.set) {
				c := e.common()
				if s.counts[c]++; s.counts[c] > 1 {
					continue
				}
			}
			s.sizes[e.setPlace()]++
			if len(have) > 0 {
				if h, ok := have[e.place()]; ok {
					if delete(have, e.place()); h.same(&e.Element) {
						continue
					}
					out.gone = append(out.gone, member{e.family, e.set, h})
				}
			}
			out.come = append(out.come, *e)
		}
	}
	for p, e := range have {
		out.gone = append(out.gone, member{p.family, p.set, e})
	}
	return out
}
