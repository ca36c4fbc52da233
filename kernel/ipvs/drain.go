package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

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
		if _, _, err := b.read(nil); err != nil {
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
		// A rule that refers to one says that it is wanted again.
		errs.all = multierror.Append(errs.all, kernel.DestroySets(ctx, b.config.Sets, b.doomed, false))
		b.doomed = nil
	}
	return b.draining(), errors.Join(err, errs.all.ErrorOrNil())
}

// Sever implements [kernel.Severer]: with net.ipv4.vs.expire_nodest_conn, the next packet of a connection whose real server
// is gone ends it, and the one after is refused.
func (b *Backend) Sever(p service.Protocol, endpoint netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.servers {
		if _, drains := s.draining[endpoint]; drains && s.Protocol == p {
			s.draining[endpoint] = time.Time{}
		}
	}
}

// draining counts what still drains.
func (b *Backend) draining() int {
	n := 0
	for _, s := range b.servers {
		n += len(s.draining)
		if s.removed && len(s.draining) == 0 && !s.foreign {
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
	var requests []Request
	ends := make([]int, len(of)) // of each one's requests
	for i, s := range of {
		requests = append(requests, s.finishing(found[keyOf(s.Virtual)], b.config.Now())...)
		ends[i] = len(requests)
	}
	results := b.config.Table.Change(requests...)
	gone := b.newEntries()
	var addresses []netip.Addr // of virtual servers that are gone
	begin := 0
	for i, s := range of {
		removed, err := s.finished(found[keyOf(s.Virtual)], requests[begin:ends[i]], results[begin:ends[i]], gone, errs.applied)
		begin = ends[i]
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

// finishing returns the requests that remove the real servers of s that have drained,
// or s itself if it goes with them. A virtual server in which others have a real
// server stays for that one. A real server that still drains loses the weight that
// others gave it.
func (s *server) finishing(found Server, now time.Time) []Request {
	var out []Request
	rest := 0
	for i, r := range found.Reals {
		deadline, draining := s.draining[r.Address]
		switch {
		case draining && (found.Connections[i] == 0 || !now.Before(deadline)), s.removed && !drains(s) && s.reals[r.Address]:
			out = append(out, Request{Do: Delete, Virtual: s.Virtual, Real: kernel.Real{Address: r.Address}})
			continue
		case draining && r.Weight > 0: // others gave it weight
			out = append(out, Request{Do: Edit, Virtual: s.Virtual, Real: kernel.Real{Address: r.Address}})
		}
		rest++
	}
	if s.removed && rest == 0 {
		return []Request{{Do: Delete, Virtual: s.Virtual}}
	}
	return out
}

// finished notes what became of these requests, and reports whether s is gone.
func (s *server) finished(found Server, requests []Request, results []error, gone *entries, a *kernel.Applied) (removed bool, err error) {
	var errs *multierror.Error
	there := map[netip.AddrPort]bool{} // from here on
	for _, r := range found.Reals {
		there[r.Address] = true
	}
	for i, r := range requests {
		err := results[i]
		if errors.Is(err, kernel.ErrNotFound) && r.Do == Delete {
			err = nil
		}
		switch {
		case err != nil:
			errs = multierror.Append(errs, err)
		case !r.ofReal():
			a.Virtuals++
			s.forgetDrained(nil, gone)
			return true, nil
		case r.Do == Delete:
			a.Virtuals++
			delete(there, r.Real.Address)
			delete(s.reals, r.Real.Address)
		}
	}
	s.forgetDrained(there, gone)
	s.foreign = len(there) > 0
	for address := range there {
		if _, draining := s.draining[address]; draining || s.reals[address] {
			s.foreign = false
		}
	}
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
