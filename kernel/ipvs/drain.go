package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Drain removes the real servers that have drained, whose connections are gone
// or whose time is up, and what goes with them. It returns how many still drain;
// call it every second while there are any, and once at start, for those that an
// earlier process left.
func (b *Backend) Drain(ctx context.Context) (left int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.servers == nil {
		if _, err := b.look(nil); err != nil {
			return 0, err
		}
	}
	if err := ctx.Err(); err != nil {
		return b.draining(), err
	}
	var of []*server
	for _, s := range b.servers {
		if s.removed || len(s.draining) > 0 {
			of = append(of, s)
		}
	}
	slices.SortFunc(of, func(a, b *server) int { return kernel.CompareVirtuals(a.Virtual, b.Virtual) })
	errs := errorsOf{applied: &kernel.Applied{Failed: map[service.Key]error{}}}
	if len(of) > 0 {
		err = b.finish(of, &errs)
	}
	for _, why := range errs.applied.Failed {
		errs.all = multierror.Append(errs.all, why)
	}
	if len(b.doomed) > 0 && !b.recording() {
		for _, name := range b.doomed {
			// A rule that refers to it says that it is wanted again.
			if e := b.config.Sets.Destroy(name); e != nil && !errors.Is(e, kernel.ErrNotFound) && !errors.Is(e, kernel.ErrBusy) {
				errs.all = multierror.Append(errs.all, e)
			}
		}
		b.doomed = nil
	}
	return b.draining(), errors.Join(err, errs.all.ErrorOrNil())
}

// draining counts what still drains.
func (b *Backend) draining() int {
	n := 0
	for _, s := range b.servers {
		n += len(s.draining)
		if s.removed && len(s.draining) == 0 {
			n++ // to be tried again
		}
	}
	return n
}

// finish removes what of some virtual servers has drained. Errors of single ones
// are added to errs.
func (b *Backend) finish(of []*server, errs *errorsOf) error {
	var ask []kernel.Virtual
	for _, s := range of {
		if s.removed || len(s.draining) > 0 {
			ask = append(ask, s.Virtual)
		}
	}
	if len(ask) == 0 {
		return nil
	}
	servers, err := b.config.Table.List(ask...)
	if err != nil {
		return err
	}
	found := map[key]Server{}
	for _, s := range servers {
		found[keyOf(s.Virtual)] = s
	}
	gone := b.newEntries()
	var addresses []netip.Addr // of virtual servers that are gone
	for _, s := range of {
		removed, err := b.finishServer(s, found[keyOf(s.Virtual)], gone, errs.applied)
		errs.add(s.Owner, err)
		if removed {
			delete(b.servers, keyOf(s.Virtual))
			gone.virtual(s.Virtual)
			addresses = append(addresses, s.Address.Addr())
		}
	}
	if err := gone.remove(); err != nil {
		return err
	}
	return b.dropUnused(addresses, errs.applied)
}

// finishServer removes the real servers of s that have drained, or s itself if
// it goes with them, which it tells. A virtual server in which somebody else has
// a real server stays for that.
func (b *Backend) finishServer(s *server, found Server, gone *entries, a *kernel.Applied) (removed bool, err error) {
	var finished []netip.AddrPort // own ones that go now
	rest := 0
	var errs *multierror.Error
	for i, r := range found.Reals {
		deadline, draining := s.draining[r.Address]
		switch {
		case draining && (found.Connections[i] == 0 || !b.config.Now().Before(deadline)), s.removed && !drains(s) && s.reals[r.Address]:
			finished = append(finished, r.Address)
			continue
		case draining && r.Weight > 0: // somebody gave it work
			errs = multierror.Append(errs, b.config.Table.Real(Edit, s.Virtual, kernel.Real{Address: r.Address}))
		}
		rest++
	}
	if s.removed && rest == 0 {
		if err := b.config.Table.Virtual(Delete, s.Virtual); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return false, err
		}
		a.Virtuals++
		s.forgetDrained(nil, gone)
		return true, nil
	}
	there := map[netip.AddrPort]bool{} // from here on
	for _, r := range found.Reals {
		there[r.Address] = true
	}
	for _, address := range finished {
		err := b.config.Table.Real(Delete, s.Virtual, kernel.Real{Address: address})
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, err)
			continue
		}
		a.Virtuals++
		delete(there, address)
		delete(s.reals, address)
	}
	s.forgetDrained(there, gone)
	return false, errs.ErrorOrNil()
}

// forgetDrained forgets real servers that drained and aren't there any more.
func (s *server) forgetDrained(there map[netip.AddrPort]bool, gone *entries) {
	for address := range s.draining {
		if !there[address] {
			delete(s.draining, address)
			gone.drain(s, address)
		}
	}
}
