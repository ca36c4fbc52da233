package nftables

import (
	"context"
	"encoding/binary"
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

// Follow implements [kernel.Steering]: in one transaction, by the rules of services too where the kernel holds those of
// the last plan. Else, and after an error, it reads back who gets new connections, and leaves the rest to Sync.
func (p *Plane) Follow(_ context.Context, x *plan.Plan, d plan.Delta) (r kernel.Result) {
	t := p.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.held.plan != nil {
		changes := p.held.change(t.families, d, p.refused)
		if _, r.Err = p.write(x, changes, &r, false); r.Err != nil {
			p.held.begin()
			return r
		}
		r.Tried = r.Tried && (r.Applied.Chains > 0 || slices.ContainsFunc(d.Changes, plan.Change.Rules))
		for _, c := range d.Changes {
			if c.Rules() {
				delete(p.refused, c.Key())
			}
		}
		return r
	}
	if r.Err = t.ensure(); r.Err != nil { // first: it replaces another release's tables with their elements
		return r
	}
	have, err := t.elements(steeringSets...)
	if err != nil {
		return kernel.Result{Err: err}
	}
	s := newScope(false)
	changes := s.whole(t.families, have, x, nil)
	var requests [][]byte
	for _, f := range t.families {
		// The chains that refused services lead to.
		requests = append(requests, newChain(f, &Chain{Name: chainReject}), newChain(f, &Chain{Name: chainElsewhere}))
	}
	if r.Err = t.commit(append(requests, changes.requests(t)...)); r.Err != nil {
		return r
	}
	maps.Copy(t.entries, s.sizes)
	r.Applied.Entries = len(changes.gone) + len(changes.come)
	return r
}

// SetEntries implements [kernel.SetCounter].
func (p *Plane) SetEntries() (map[string]int, error) {
	p.tables.mu.Lock()
	defer p.tables.mu.Unlock()
	out := map[string]int{}
	for set, n := range p.tables.entries {
		out[nfWord(set.family)+" "+Name+" "+set.set] = n
	}
	return out, nil
}

// Damage implements [kernel.Steering]. Check finds what is damaged of all sets.
func (*Plane) Damage() (string, error) { return "", nil }

// Alive implements [kernel.Heartbeat].
func (p *Plane) Alive(d time.Duration) error { return p.protocols(setAlive, d) }

// Dead implements [kernel.Heartbeat].
func (p *Plane) Dead() error { return p.protocols(setAlive, 0) }

// Starting implements [kernel.Heartbeat].
func (p *Plane) Starting(d time.Duration) error { return p.protocols(setStarting, d) }

// Started implements [kernel.Heartbeat].
func (p *Plane) Started() error { return p.protocols(setStarting, 0) }

// protocols fills a set with the protocols of userspace, for d from now on; for 0 it is
// emptied. A set that isn't there is made.
func (p *Plane) protocols(set string, d time.Duration) error {
	t := p.tables
	var requests [][]byte
	for _, f := range t.families {
		requests = append(requests, changeElements(f, unix.NFT_MSG_DELSETELEM, t.sets[f][set], 0, nil)...)
		if d > 0 {
			var elements []Element
			for _, protocol := range userProtocols {
				elements = append(elements, Element{Key: protocolBytes(protocol), Timeout: d})
			}
			requests = append(requests, changeElements(f, unix.NFT_MSG_NEWSETELEM, t.sets[f][set], len(elements), func(i int) *Element { return &elements[i] })...)
		}
	}
	err := t.beat(requests)
	if errors.Is(err, unix.ENOENT) {
		t.mu.Lock()
		err = t.ensure()
		if t.mu.Unlock(); err == nil {
			err = t.beat(requests)
		}
	}
	if err != nil {
		return fmt.Errorf("refresh set %s: %w", set, err)
	}
	return nil
}

// LetRefusals implements [kernel.Exceptions].
func (p *Plane) LetRefusals(endpoint netip.AddrPort, d time.Duration) error {
	f := service.FamilyOf(endpoint.Addr())
	return p.renew([]member{{f, setTold, Element{Key: destination(endpoint.Addr(), service.TCP, endpoint.Port()), Timeout: d}}})
}

// KeepConnections implements [kernel.Exceptions].
func (p *Plane) KeepConnections(d time.Duration, connections []kernel.Redirected) error {
	var list []member
	for _, c := range connections {
		f := service.FamilyOf(c.Client.Addr())
		list = append(list, member{f, setKept, Element{Key: socketBytes(c.Client) + bytesOf(c.Address.Addr()), Timeout: d}})
	}
	return p.renew(list)
}

func (p *Plane) renew(list []member) error {
	p.tables.mu.Lock()
	defer p.tables.mu.Unlock()
	return p.tables.renew(list)
}

// renew adds elements that expire, or gives those that are there a new lifetime: kernels
// before 6.12 don't when they are added again. So those that are there are deleted in the
// same transaction. One that expires in between spoils it, and it is done again.
func (t *tables) renew(list []member) error {
	if len(list) == 0 {
		return nil
	}
	const attempts = 5
	for i := 0; ; i++ {
		have, err := t.elements(list[0].set)
		if err != nil {
			return err
		}
		d := difference{come: list}
		for _, e := range list {
			if _, there := have[e.place()]; there {
				delete(have, e.place()) // list may have it twice
				d.gone = append(d.gone, e)
			}
		}
		if err = t.commit(d.requests(t)); err == nil || i == attempts || !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
}

// Local implements [kernel.Steering].
func (p *Plane) Local(a netip.Addr) bool {
	return a == steering.ListenerAddress[service.IPv4] || a == steering.ListenerAddress[service.IPv6]
}

// Missing implements [kernel.Steering].
func (p *Plane) Missing() ([]string, error) { return p.routing.Routing.Missing() }

func readCounter(attributes []byte) (table, name string, packets uint64) {
	if v := attribute(attribute(attributes, unix.NFTA_OBJ_DATA), unix.NFTA_COUNTER_PACKETS); len(v) == 8 {
		packets = binary.BigEndian.Uint64(v)
	}
	return netlink.Text(attribute(attributes, unix.NFTA_OBJ_TABLE)), netlink.Text(attribute(attributes, unix.NFTA_OBJ_NAME)), packets
}
