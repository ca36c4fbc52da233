package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Redirects is the [kernel.Steering] of nftables: memberships of the sets that say who
// gets new connections.
type Redirects struct {
	tables  *tables
	routing *steering.Routing
	held    *scope
	checked int // foreign transactions after which memberships were as they should be
}

func newRedirects(t *tables, r *steering.Routing) *Redirects {
	s := &Redirects{tables: t, routing: r}
	s.held = newScope((*members).addSteering, steeringSets...)
	s.held.begin()
	return s
}

// Close closes the socket, which is the plane's as well.
func (s *Redirects) Close() { _ = s.tables.close() }

// Follow implements [kernel.Steering]: in one transaction.
func (s *Redirects) Follow(_ context.Context, p *plan.Plan, d plan.Delta) (entries int, err error) {
	t := s.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	var x difference
	if s.held.plan != nil {
		x = s.held.change(t.families, d, nil)
	} else {
		if err := t.ensure(); err != nil { // first: it replaces another release's tables with their elements
			return 0, err
		}
		have, err := t.elements(s.held.names...)
		if err != nil {
			return 0, err
		}
		x = s.held.whole(t.families, have, p, nil)
	}
	var requests [][]byte
	if requests = x.requests(t); len(requests) > 0 {
		// The chains that refused services lead to. An earlier release's rules may be there, which
		// drop nothing by themselves.
		var chains [][]byte
		for _, f := range t.families {
			chains = append(chains, newChain(f, &Chain{Name: chainReject}), newChain(f, &Chain{Name: chainElsewhere}))
			if _, written := t.chains[f][chainElsewhere]; !written {
				dropping := rule(drop)
				chains = append(chains, flushChain(f, chainElsewhere), newRule(f, chainElsewhere, &dropping))
			}
		}
		requests = append(chains, requests...)
	}
	if err := t.commit(requests); err != nil {
		s.held.begin()
		return 0, fmt.Errorf("follow the plan: %w", err)
	}
	s.held.plan = p
	maps.Copy(t.entries, s.held.sizes)
	return len(x.gone) + len(x.come), nil
}

// SetEntries implements [kernel.SetCounter].
func (s *Redirects) SetEntries() (map[string]int, error) {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	out := map[string]int{}
	for set, n := range s.tables.entries {
		out[nfWord(set.family)+" "+Name+" "+set.set] = n
	}
	return out, nil
}

// Damage implements [kernel.Steering].
func (s *Redirects) Damage() (string, error) {
	t := s.tables
	t.mu.Lock()
	err := t.notice(0)
	foreign := t.foreign
	p, look := s.held.plan, err == nil && s.held.plan != nil && foreign != s.checked
	var d difference
	if look {
		d, err = lackingTwice(func() (difference, error) {
			have, err := t.elements(s.held.names...)
			if err != nil {
				return difference{}, err
			}
			return s.held.whole(t.families, have, p, nil), nil
		})
	}
	t.mu.Unlock()
	if !look || err != nil {
		s.held.plan = p // which the first look may have taken away
		return "", err
	}
	s.checked = foreign
	if len(d.gone)+len(d.come) == 0 {
		s.held.plan = p
		return "", nil
	}
	return fmt.Sprintf("%d elements gone, %d foreign", len(d.come), len(d.gone)), nil
}

// Alive implements [kernel.Heartbeat].
func (s *Redirects) Alive(d time.Duration) error { return s.protocols(setAlive, d) }

// Dead implements [kernel.Heartbeat].
func (s *Redirects) Dead() error { return s.protocols(setAlive, 0) }

// Starting implements [kernel.Heartbeat].
func (s *Redirects) Starting(d time.Duration) error { return s.protocols(setStarting, d) }

// Started implements [kernel.Heartbeat].
func (s *Redirects) Started() error { return s.protocols(setStarting, 0) }

// protocols fills a set with the protocols of userspace, for d from now on; for 0 it is
// emptied. A set that isn't there is made.
func (s *Redirects) protocols(set string, d time.Duration) error {
	t := s.tables
	var requests [][]byte
	for _, f := range t.families {
		requests = append(requests, changeElements(f, unix.NFT_MSG_DELSETELEM, t.sets[f][set], 0, nil)...)
		if d > 0 {
			var elements []Element
			for _, p := range userProtocols {
				elements = append(elements, Element{Key: protocolBytes(p), Timeout: d})
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
func (s *Redirects) LetRefusals(endpoint netip.AddrPort, d time.Duration) error {
	f := service.FamilyOf(endpoint.Addr())
	return s.renew([]member{{f, setTold, Element{Key: destination(endpoint.Addr(), service.TCP, endpoint.Port()), Timeout: d}}})
}

// KeepConnections implements [kernel.Exceptions].
func (s *Redirects) KeepConnections(d time.Duration, connections []kernel.Redirected) error {
	var list []member
	for _, c := range connections {
		f := service.FamilyOf(c.Client.Addr())
		list = append(list, member{f, setKept, Element{Key: socketBytes(c.Client) + bytesOf(c.Address.Addr()), Timeout: d}})
	}
	return s.renew(list)
}

func (s *Redirects) renew(list []member) error {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	return s.tables.renew(list)
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
func (s *Redirects) Local(a netip.Addr) bool {
	return a == steering.ListenerAddress[service.IPv4] || a == steering.ListenerAddress[service.IPv6]
}

// Missing implements [kernel.Steering].
func (s *Redirects) Missing() ([]string, error) { return s.routing.Missing() }

func readCounter(attributes []byte) (table, name string, packets uint64) {
	if v := attribute(attribute(attributes, unix.NFTA_OBJ_DATA), unix.NFTA_COUNTER_PACKETS); len(v) == 8 {
		packets = binary.BigEndian.Uint64(v)
	}
	return nlmsg.Text(attribute(attributes, unix.NFTA_OBJ_TABLE)), nlmsg.Text(attribute(attributes, unix.NFTA_OBJ_NAME)), packets
}
