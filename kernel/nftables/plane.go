package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plane is steering and data plane of nftables: the rules that all services share, and the elements of sets. What
// isn't safe for concurrent use of it is guarded by the tables' lock.
type Plane struct {
	tables  *tables
	options *Options
	routing steering.RoutingWatch
	held    *scope // its plan is the one whose elements the kernel holds

	want    *plan.Plan
	have    map[place]Element     // what was read; nil once it was compared
	failing bool                  // the last Sync has failed, or services are refused
	refused map[service.Key]error // services that the kernel has no rules of, because it refused them
	steered bool
	damaged bool
	checked int       // foreign transactions after which what the kernel holds was as it should be
	next    time.Time // when to look again
}

var (
	_ kernel.Steering       = (*Plane)(nil)
	_ kernel.SetCounter     = (*Plane)(nil)
	_ kernel.Plane          = (*Plane)(nil)
	_ kernel.Counter        = (*Plane)(nil)
	_ kernel.AffinityKeeper = (*Plane)(nil)
)

// Open opens the tables in the network namespace of the calling thread, and changes nothing.
func Open(o Options, r *steering.Routing) (*Plane, error) {
	t, err := openTables(o.Families())
	if err != nil {
		return nil, err
	}
	return &Plane{tables: t, options: &o, routing: steering.RoutingWatch{Routing: r}, held: newScope(true)}, nil
}

// Adopt implements [kernel.Plane].
func (p *Plane) Adopt(_ context.Context, s *service.Snapshot) (map[service.Key]bool, error) {
	p.tables.mu.Lock()
	defer p.tables.mu.Unlock()
	if err := p.read(); err != nil {
		return nil, err
	}
	out := map[service.Key]bool{}
	for x := range s.All() {
		served, user := false, false
		for _, at := range addresses(x) {
			_, is := p.have[place{at.family, setServices, at.key}]
			_, in := p.have[place{at.family, setUserspace, at.key}]
			served, user = served || is, user || in
		}
		if served && !user {
			out[x.Key] = true
		}
	}
	return out, nil
}

// addresses returns where a service port's addresses would be found in sets, whose name is left out.
func addresses(p *service.Port) (out []place) {
	for _, a := range slices.Concat(p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs) {
		out = append(out, place{family: service.FamilyOf(a), key: destination(a, p.Protocol, p.Number)})
	}
	if p.NodePort != 0 {
		for _, f := range service.Families {
			out = append(out, place{family: f, key: destination(zero[f], p.Protocol, p.NodePort)})
		}
	}
	return out
}

// read reads back what the kernel holds. The caller holds the tables' lock.
func (p *Plane) read() (err error) {
	p.damaged = false
	p.held.begin()
	p.have, err = p.tables.elements(p.held.names...)
	return err
}

// Want implements [kernel.Plane]. The plan has been followed.
func (p *Plane) Want(x *plan.Plan, d plan.Delta) bool {
	p.want = x
	return !p.failing || d.Full || len(d.Changes) > 0
}

// Programmed implements [kernel.Plane].
func (p *Plane) Programmed() map[service.Key]uint64 {
	out := map[service.Key]uint64{}
	if p.want == nil {
		return out
	}
	for _, s := range p.want.Services {
		if s.Kernel == plan.NFTables && p.holds(s) {
			out[s.Port.Key] = s.KernelHash
		}
	}
	return out
}

// holds reports whether the kernel holds what s wants.
func (p *Plane) holds(s *plan.Service) bool {
	if p.held.plan != nil {
		return p.refused[s.Port.Key] == nil
	}
	var m members
	m.addService(s)
	m.unique(p.tables.families)
	return len(p.have) > 0 && !slices.ContainsFunc(m.list, func(e member) bool {
		h, ok := p.have[e.place()]
		return !ok || !h.same(&e.Element)
	})
}

// Sync implements [kernel.Plane]. It reads all that is there, and compares, unless nothing is to be done; the kernel is asked again for
// services that it refused. Where it refuses a transaction, the next attempt does without the services that it is refused for, unless
// others have changed something meanwhile: then that may be why, as where they deleted a table.
func (p *Plane) Sync(_ context.Context, steered func()) (r kernel.Result) {
	const attempts, disturbed = 6, 3
	t := p.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.held.plan != nil && !p.damaged && len(p.refused) == 0 {
		p.sweep()
		p.failing = false
		return kernel.Result{Holds: p.count()}
	}
	p.refused = map[service.Key]error{}
	r.Full = true
	for attempt := range attempts {
		var culprits map[service.Key]error
		before := t.disturbances()
		culprits, r.Err = p.sync(&r, steered)
		if r.Err == nil || !refused(r.Err) {
			break
		}
		if attempt < disturbed && t.disturbances() != before {
			continue
		}
		if len(culprits) == 0 {
			break
		}
		maps.Copy(p.refused, culprits)
	}
	if p.failing = r.Err != nil || len(p.refused) > 0; r.Err != nil {
		_ = p.read() // what took effect is known only by looking
		return r
	}
	r.Failed, r.Tried = maps.Clone(p.refused), r.Tried || p.failing
	return r
}

// sync makes one attempt. If the kernel refuses it, culprits are the services for which it does.
func (p *Plane) sync(r *kernel.Result, steered func()) (culprits map[service.Key]error, _ error) {
	t := p.tables
	if err := t.notice(0); err != nil {
		return nil, err
	}
	foreign := t.foreign
	if err := p.read(); err != nil {
		return nil, err
	}
	for _, f := range t.families { // write every rule anew
		clear(t.chains[f])
	}
	empty := true
	for at := range p.have {
		if empty = slices.Contains(steeringSets, at.set); !empty {
			break
		}
	}
	d := p.held.whole(t.families, p.have, p.want, p.refused)
	p.have = nil
	first := d.cutSteering()
	if err := p.writeRules(r, first); err != nil {
		p.held.begin()
		return nil, fmt.Errorf("lead connections to userspace: %w", err)
	}
	if !p.steered {
		r.Steered, p.steered = true, true
		steered()
	}
	if chains, err := p.write(p.want, d, r, empty); err != nil {
		if refused(err) {
			culprits = p.culprits(chains, d)
		}
		p.held.begin()
		return culprits, err
	}
	p.sweep()
	if empty { // where there was something, the list may have lacked some, see lackingTwice
		p.checked = foreign
	}
	return nil, nil
}

// write has the kernel hold x, to which d leads from what it holds: in one transaction, but where it has nothing of services. If
// that fails, it returns the requests that make chains.
func (p *Plane) write(x *plan.Plan, d difference, r *kernel.Result, empty bool) (chains [][]byte, err error) {
	t := p.tables
	var written [2]map[string]code
	rules := 0
	for _, f := range t.families {
		more, w, n := t.writeChains(f, p.chains(f, x, r.Full, &d))
		chains, written[f], rules = append(chains, more...), w, rules+n
		if n += r.Written[f][Name]; n > 0 {
			r.Written[f] = map[string]int{Name: n}
		}
	}
	if len(chains)+len(d.gone)+len(d.come) > 0 {
		r.Tried = true
		if empty {
			err = t.fill(chains, d.come)
		} else {
			err = t.commit(append(slices.Clip(chains), d.requests(t)...))
		}
		if err != nil {
			return chains, fmt.Errorf("program nftables: %w", err)
		}
		r.Applied.Add(kernel.Applied{Rules: rules, Entries: len(d.gone) + len(d.come), Chains: len(written[0]) + len(written[1])})
	}
	for f := range written {
		maps.Copy(t.chains[f], written[f])
	}
	if r.Full || rules > 0 {
		if err := p.learn(r.Full, written); err != nil {
			return nil, err
		}
	}
	maps.Copy(t.entries, p.held.sizes)
	p.held.plan, r.Holds = x, p.count()
	return nil, nil
}

// chains returns the chains that all services share, and those of treatments: of all, if whole
// is set or the policy that they are made by has changed, else of those that d touches. It
// notes the chains of touched treatments that are needed no more as stale.
func (p *Plane) chains(f service.Family, is *plan.Plan, whole bool, d *difference) []Chain {
	t := p.tables
	r := newRules(p.options, f, &is.Policy)
	// A change of services hardly ever comes with another policy, and to make the rules by it costs more than all else.
	if !whole && !p.held.plan.Policy.Equal(&is.Policy) {
		_, written, _ := t.writeChains(f, r.chains())
		whole = len(written) > 0
	}
	wanted, touched := p.held.treatments[f], map[treatment]int{}
	for _, x := range d.touched[f] {
		if wanted[x] > 0 {
			touched[x] = wanted[x]
		}
		for _, c := range r.treat(x) {
			if _, there := t.chains[f][c.Name]; there {
				t.use(f, c.Name, wanted[x] > 0)
			}
		}
	}
	if whole {
		return r.withTreatments(wanted)
	}
	return r.treatments(touched)
}

// culprits are the services for which the kernel refuses a transaction that makes chains and
// changes elements. It is asked about every element by itself.
func (p *Plane) culprits(chains [][]byte, d difference) map[service.Key]error {
	t := p.tables
	requests := append(slices.Clip(chains), (&difference{gone: d.gone}).requests(t)...)
	first := len(requests)
	for i := range d.come {
		e := &d.come[i]
		requests = append(requests, changeElements(e.family, unix.NFT_MSG_NEWSETELEM, t.sets[e.family][e.set], 1, func(int) *Element { return &e.Element })...)
	}
	refusals, err := t.socket.Refusals(unix.NFNL_SUBSYS_NFTABLES, requests)
	if err != nil {
		return nil
	}
	elements, named := map[place]error{}, map[string]error{}
	for i := range refusals {
		at := refusals[i].Index
		if err := requestError(requests, &refusals[i]); at >= first {
			elements[d.come[at-first].place()] = err
		} else if at >= 0 {
			_, chain := about(requests[at])
			named[chain] = err
		}
	}
	out := map[service.Key]error{}
	for _, s := range p.want.Services {
		m := p.held.of(t.families, s, true)
		for _, e := range m.list {
			if err := elements[e.place()]; err != nil {
				out[s.Port.Key] = err
			}
		}
		for f := range m.treatments {
			for _, x := range m.treatments[f] {
				if len(named) == 0 {
					break
				}
				for _, c := range newRules(p.options, service.Family(f), &p.want.Policy).treat(x) {
					if err := named[c.Name]; err != nil {
						out[s.Port.Key] = err
					}
				}
			}
		}
	}
	return out
}

// writeRules makes the tables where they aren't there, and writes the rules that all
// services share, with what changes of steering's sets.
func (p *Plane) writeRules(r *kernel.Result, d difference) error {
	if err := p.routing.Ensure(); err != nil {
		return err
	}
	t := p.tables
	if err := t.ensure(); err != nil {
		return err
	}
	var requests [][]byte
	for _, f := range t.families {
		if p.options.Flowtable {
			requests = append(requests, newFlowtable(f))
		}
		more, written, n := t.writeChains(f, newRules(p.options, f, &p.want.Policy).chains())
		requests = append(requests, more...)
		maps.Copy(t.chains[f], written)
		r.Applied.Rules += n
		r.Written[f] = map[string]int{Name: n}
	}
	if err := t.commit(append(requests, d.requests(t)...)); err != nil {
		return err
	}
	if p.options.Flowtable {
		t.devices = nil
		return t.followDevices()
	}
	for _, f := range t.families {
		_ = t.commit([][]byte{deleteFlowtable(f)}) // that of a kproxy that was told to have one
	}
	return nil
}

// learn notes how the kernel lists the chains that were written. One that has another number
// of rules was changed meanwhile: the next pass writes it anew. If everything was, other
// chains are stale.
func (p *Plane) learn(whole bool, written [2]map[string]code) error {
	t := p.tables
	have, err := t.readRules()
	if err != nil {
		return err
	}
	for _, f := range t.families {
		for name, c := range t.chains[f] {
			if _, now := written[f][name]; now || whole {
				if have[f][name].rules != c.rules {
					p.damaged = true
				}
				t.listed[f][name] = have[f][name]
			}
		}
		if !whole {
			continue
		}
		wanted := map[string]bool{}
		for _, c := range newRules(p.options, f, &p.want.Policy).withTreatments(p.held.treatments[f]) {
			wanted[c.Name] = true
		}
		for name := range have[f] {
			if delete(t.stale[f], name); !wanted[name] {
				t.stale[f][name], t.listed[f][name] = time.Time{}, have[f][name]
			}
		}
	}
	return nil
}

// sweep deletes chains that have been stale for long enough, in one transaction unless that fails: others may have deleted
// some, or keep some in use. Kernels before 6.2 say that chains are busy until a moment after
// the last element that led there. Then the next pass, or check, deletes them.
func (p *Plane) sweep() {
	t := p.tables
	for _, f := range t.families {
		var stale []string
		for name, since := range t.stale[f] {
			if time.Since(since) >= t.spare {
				stale = append(stale, name)
			}
		}
		var requests [][]byte
		for _, name := range stale {
			requests = append(requests, flushChain(f, name))
		}
		for _, name := range stale {
			requests = append(requests, deleteChain(f, name))
		}
		all := t.commit(requests)
		for i, name := range stale {
			err := all
			if err != nil {
				if t.commit(requests[i:i+1]) == nil { // it is written anew if a service needs it again
					t.chains[f][name], t.listed[f][name] = code{}, listed{}
				}
				err = t.commit([][]byte{deleteChain(f, name)})
			}
			if err == nil || errors.Is(err, unix.ENOENT) {
				delete(t.stale[f], name)
				delete(t.chains[f], name)
				delete(t.listed[f], name)
			}
		}
	}
}

func (p *Plane) count() *kernel.Objects {
	var o kernel.Objects
	for _, f := range p.tables.families {
		n := 0
		for _, c := range p.tables.chains[f] {
			n += c.rules
		}
		o.Rules[f] = map[string]int{Name: n}
	}
	return &o
}

// Check implements [kernel.Plane]. While no other program has changed anything in the kernel's
// nftables, it is one question. Programs that do so all the time don't make kproxy read
// its elements all the time: it does so for a fifth of the time. A device that can't be followed
// is an error beside what is damaged.
func (p *Plane) Check(context.Context) ([]string, error) {
	t := p.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.notice(0); err != nil {
		return nil, err
	}
	if p.held.plan == nil {
		return nil, nil
	}
	p.sweep() // also where no service changes any more
	var devices error
	if p.options.Flowtable && !p.damaged {
		devices = t.followDevices()
	}
	devices = errors.Join(devices, t.unfollowed)
	t.unfollowed = nil
	out, err := p.damage()
	return out, errors.Join(devices, err)
}

// damage returns what isn't as it was written, a phrase each.
func (p *Plane) damage() ([]string, error) {
	const rest = 4
	t := p.tables
	out, err := p.routing.Missing()
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i] += " is gone"
	}
	if p.damaged && len(out) == 0 { // see learn
		out = append(out, fmt.Sprintf("rules of table %s were changed while they were written", Name))
	}
	p.damaged = p.damaged || len(out) > 0
	begin := time.Now()
	if t.foreign == p.checked || begin.Before(p.next) {
		return out, nil
	}
	foreign := t.foreign
	chains, err := t.readRules()
	if err != nil {
		return nil, err
	}
	d, err := lackingTwice(func() (difference, error) {
		have, err := t.elements(p.held.names...)
		return newScope(true).whole(t.families, have, p.held.plan, p.refused), err
	})
	if err != nil {
		return nil, err
	}
	for _, f := range t.families {
		if !maps.Equal(chains[f], t.listed[f]) {
			out = append(out, fmt.Sprintf("rules of table %s %s were changed", nfWord(f), Name))
		}
	}
	if len(d.gone)+len(d.come) > 0 {
		out = append(out, fmt.Sprintf("table %s: %d elements are gone or changed, %d foreign", Name, len(d.come), len(d.gone)))
	}
	p.next = time.Now().Add(rest * time.Since(begin))
	p.damaged = p.damaged || len(out) > 0
	p.checked = foreign
	return out, nil
}

// Counts implements [kernel.Counter].
func (p *Plane) Counts(context.Context) (c kernel.Counts, err error) {
	t := p.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	sums := map[string]*uint64{countInvalid: &c.Invalid, countRefused: &c.Refused, countSteered: &c.Steered}
	for _, f := range t.families {
		err := t.dump(unix.NFT_MSG_GETOBJ, f, func(b []byte) []byte {
			b = netlink.AppendText(b, unix.NFTA_OBJ_TABLE, Name)
			return netlink.AppendUint32(b, unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
		}, func(b []byte) {
			table, name, packets := readCounter(b)
			if sum := sums[name]; table == Name && sum != nil {
				*sum += packets
			}
		})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return kernel.Counts{}, err
		}
	}
	return c, nil
}

// ReadAffinity implements [kernel.AffinityKeeper].
func (p *Plane) ReadAffinity(from []kernel.Moving) (map[service.Key][]kernel.Client, error) {
	p.tables.mu.Lock()
	have, err := p.tables.elements(setAffinity)
	p.tables.mu.Unlock()
	if err != nil {
		return nil, err
	}
	type endpoint struct {
		key    service.Key
		number string
	}
	services, endpoints := map[string]service.Key{}, map[endpoint]netip.AddrPort{}
	for _, m := range from {
		k := m.Service.Port.Key
		for i := range m.Service.Frontends {
			services[keyOf(&m.Service.Frontends[i])] = k
		}
		for i := range m.Service.Endpoints {
			a := m.Service.Endpoints[i].Address
			endpoints[endpoint{k, numberBytes(endpointNumber(a))}] = a
		}
	}
	out := map[service.Key][]kernel.Client{}
	for at, e := range have {
		n := typeAddr[at.family].size
		client, _ := netip.AddrFromSlice([]byte(at.key[:n]))
		k, ok := services[at.key[n:]]
		if a, known := endpoints[endpoint{k, e.Data}]; ok && known {
			out[k] = append(out[k], kernel.Client{Address: client, Endpoint: a, Remaining: e.Timeout})
		}
	}
	return out, nil
}

// SeedAffinity implements [kernel.AffinityKeeper].
func (p *Plane) SeedAffinity(_ context.Context, to []kernel.Moving, clients map[service.Key][]kernel.Client) error {
	var d difference
	for _, m := range to {
		usable, local := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
		for i := range m.Service.Endpoints {
			e := &m.Service.Endpoints[i]
			usable[e.Address], local[e.Address] = e.Usable, e.Local
		}
		seen := map[string]bool{}
		for i := range m.Service.Frontends {
			f := &m.Service.Frontends[i]
			for _, c := range clients[m.Service.Port.Key] {
				k := bytesOf(c.Address) + homeOf(m.Service, f)
				if service.FamilyOf(c.Address) == f.Family && usable[c.Endpoint] && (local[c.Endpoint] || !f.Local) && !seen[k] && c.Remaining > 0 {
					seen[k] = true
					d.come = append(d.come, member{f.Family, setAffinity, Element{
						Key: k, Data: numberBytes(endpointNumber(c.Endpoint)), Timeout: max(c.Remaining, time.Second)}})
				}
			}
		}
	}
	t := p.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.renew(d.come)
}
