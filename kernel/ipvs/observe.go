package ipvs

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Observe reads back everything that kproxy made, without what drains, and mends the
// record where others changed it.
func (b *Backend) Observe(ctx context.Context) (kernel.Ruleset, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out, err := b.config.Rules.Observe(ctx)
	if err != nil {
		return out, err
	}
	own, record, err := b.read(out.Sets)
	if err != nil {
		return kernel.Ruleset{}, err
	}
	out.Virtuals, out.Addresses = own.Virtuals, own.Addresses
	for i := range out.Sets {
		if s := &out.Sets[i]; isRecord(*s) {
			s.Entries = record[s.Name]
		}
	}
	return out, nil
}

// read reads virtual servers, link and record, remembers what is kproxy's, mends
// the record, and returns the virtual servers, the addresses, and the entries of the
// record by set. Sets are those that were read just before; nil to have them read.
func (b *Backend) read(sets []kernel.Set) (out kernel.Ruleset, mended map[string][]string, err error) {
	servers, err := b.config.Table.List()
	if err != nil {
		return out, nil, err
	}
	link, err := b.config.Link.State()
	if err != nil {
		return out, nil, err
	}
	record, err := b.readRecord()
	if err != nil {
		return out, nil, err
	}
	if sets == nil {
		if sets, err = kernel.ReadSets(b.config.Sets); err != nil {
			return out, nil, err
		}
	}
	v := view{record: record, old: b.servers, now: b.config.Now(), endpoints: endpointsOf(sets), onLink: map[netip.Addr]bool{}}
	for _, a := range link.Addresses {
		v.onLink[a] = true
	}
	b.servers = map[key]*server{}
	for _, found := range servers {
		if !v.mine(found.Virtual) {
			continue
		}
		s, used := v.read(found)
		b.servers[keyOf(found.Virtual)] = s
		if !s.removed {
			found.Virtual.Reals = used
			out.Virtuals = append(out.Virtuals, found.Virtual)
		}
	}
	out.Addresses = b.readAddresses(link)
	mended, err = b.mend(record)
	return out, mended, err
}

// readAddresses remembers what is on the link and returns those that are
// wanted: where only draining virtual servers answer, the address goes with them.
func (b *Backend) readAddresses(link LinkState) []netip.Addr {
	at := b.byAddress()
	b.addresses = make(map[netip.Addr]bool, len(link.Addresses))
	b.linkDown = link.Exists && !link.Up
	var out []netip.Addr
	for _, a := range link.Addresses {
		b.addresses[a] = !b.linkDown && !onlyRemoved(at[a])
		if b.addresses[a] {
			out = append(out, a)
		}
	}
	return out
}

// byAddress are the virtual servers of each address.
func (b *Backend) byAddress() map[netip.Addr][]*server {
	out := make(map[netip.Addr][]*server, len(b.servers))
	for _, s := range b.servers {
		out[s.Address.Addr()] = append(out[s.Address.Addr()], s)
	}
	return out
}

// onlyRemoved reports whether there are some, and all of them are on their way out.
func onlyRemoved(servers []*server) bool {
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(s *server) bool { return !s.removed })
}

// view holds what tells kproxy's own from what is foreign.
type view struct {
	record    record
	old       map[key]*server // what was known; nil at start
	now       time.Time
	endpoints map[string]bool // of SetEndpoint
	onLink    map[netip.Addr]bool
}

func endpointsOf(sets []kernel.Set) map[string]bool {
	out := map[string]bool{}
	for _, s := range sets {
		for _, f := range service.Families {
			if s.Name == kernel.FamilySet(kernel.SetEndpoint, f) {
				for _, e := range s.Entries {
					out[e] = true
				}
			}
		}
	}
	return out
}

// mine reports whether a virtual server is kproxy's: by the record, or because
// this process knows it. Where the record was emptied while no kproxy was
// there to remember, virtual servers on the link's addresses are kproxy's: nobody
// else has business there.
func (v *view) mine(s kernel.Virtual) bool {
	set := v.record[kernel.FamilySet(kernel.SetVirtual, service.FamilyOf(s.Address.Addr()))]
	if _, ok := set[kernel.AddressEntry(s.Protocol, s.Address)]; ok {
		return true
	}
	if v.old != nil {
		return v.old[keyOf(s)] != nil
	}
	return len(set) == 0 && v.onLink[s.Address.Addr()]
}

// read returns what is known of kproxy's virtual server, and which of its
// real servers are in use. Real servers that neither are endpoints nor drain
// are foreign.
func (v *view) read(found Server) (*server, []kernel.Real) {
	s := newServer(found.Virtual)
	was := v.old[keyOf(found.Virtual)]
	if was == nil {
		was = newServer(found.Virtual)
	}
	s.Owner = was.Owner
	drains := v.record[kernel.FamilySet(kernel.SetDrain, service.FamilyOf(s.Address.Addr()))]
	var used []kernel.Real
	for _, r := range found.Reals {
		deadline, draining := was.draining[r.Address]
		if !draining && !was.reals[r.Address] && r.Weight == 0 {
			var left uint32
			left, draining = drains[drainEntry(s, r.Address)]
			deadline = v.now.Add(time.Duration(int64(left)-DrainSlack) * time.Second)
		}
		switch {
		case draining:
			s.draining[r.Address] = deadline
		case was.reals[r.Address], v.endpoints[kernel.EndpointEntry(s.Protocol, r.Address)]:
			s.reals[r.Address] = true
			used = append(used, r)
		}
	}
	s.removed = len(used) == 0
	return s, used
}
