package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// applyVirtuals carries out changes: everything that takes connections first,
// then what drains. A service whose change fails is in a.Failed and doesn't
// keep others from theirs.
func (b *Backend) applyVirtuals(ctx context.Context, changes []kernel.VirtualChange, a *kernel.Applied) error {
	changes, err := b.claim(changes, a)
	if err != nil {
		return err
	}
	errs := errorsOf{applied: a}
	forget := b.newEntries() // of real servers that don't drain any more
	for i := range changes {
		if err := ctx.Err(); err != nil {
			return err
		}
		c := &changes[i]
		if c.Remove {
			continue
		}
		err := b.set(c, forget, a)
		errs.add(c.Owner, err)
	}
	if err := forget.remove(); err != nil {
		return multierror.Append(errs.all, err)
	}
	if err := b.beginDrain(ctx, changes, &errs); err != nil {
		return multierror.Append(errs.all, err)
	}
	return errs.all.ErrorOrNil()
}

// errorsOf sorts errors: those of a service concern nobody else, but a lack of
// permission everybody.
type errorsOf struct {
	applied *kernel.Applied
	all     *multierror.Error
}

func (e *errorsOf) add(owner service.Key, err error) {
	switch {
	case err == nil:
	case owner == service.Key{} || errors.Is(err, kernel.ErrPermission):
		e.all = multierror.Append(e.all, err)
	default:
		e.applied.Failed[owner] = err
	}
}

// claim records the virtual servers that are to be made, and returns the changes
// without those of services that failed already, or whose address is somebody
// else's virtual server.
func (b *Backend) claim(changes []kernel.VirtualChange, a *kernel.Applied) ([]kernel.VirtualChange, error) {
	var fresh []kernel.Virtual
	for _, c := range changes {
		if b.servers[keyOf(c.Virtual)] == nil && !c.Remove {
			fresh = append(fresh, c.Virtual)
		}
	}
	foreign := map[key]bool{}
	if len(fresh) > 0 {
		found, err := b.config.Table.List(fresh...)
		if err != nil {
			return nil, err
		}
		for _, s := range found {
			foreign[keyOf(s.Virtual)] = true
		}
	}
	entries := b.newEntries()
	lost := maps.Clone(a.Failed) // before it came to virtual servers
	var out []kernel.VirtualChange
	for _, c := range changes {
		s := b.servers[keyOf(c.Virtual)]
		if s != nil && c.Owner == (service.Key{}) {
			c.Owner = s.Owner // of a virtual server that was read back
		}
		_, failed := lost[c.Owner]
		switch {
		case failed:
			continue
		case foreign[keyOf(c.Virtual)]:
			a.Failed[c.Owner] = errForeign(c.Virtual)
			continue
		case s == nil && c.Remove:
			continue
		case s == nil:
			entries.virtual(c.Virtual)
		}
		out = append(out, c)
	}
	return out, entries.insert()
}

// flagOf is the option by which ipvsadm names a protocol.
var flagOf = map[service.Protocol]string{service.TCP: "-t", service.UDP: "-u", service.SCTP: "--sctp-service"}

func errForeign(v kernel.Virtual) error {
	return fmt.Errorf("there is a virtual server at %s %s that isn't kproxy's, and kproxy leaves it alone; if nobody needs it: ipvsadm -D %s %s",
		v.Protocol, v.Address, flagOf[v.Protocol], v.Address)
}

// set makes or changes a virtual server and the real servers that are in use.
func (b *Backend) set(c *kernel.VirtualChange, forget *entries, a *kernel.Applied) error {
	k := keyOf(c.Virtual)
	s := b.servers[k]
	switch {
	case s == nil:
		if err := b.put(Add, c.Virtual); err != nil {
			return err
		}
		s = newServer(c.Virtual)
		b.servers[k] = s
		a.Virtuals++
	case c.Settings:
		if err := b.put(Edit, c.Virtual); err != nil {
			return err
		}
		a.Virtuals++
	}
	s.Virtual, s.removed = c.Virtual, false
	for _, r := range c.Set {
		if err := b.putReal(s, r); err != nil {
			return err
		}
		a.Virtuals++
		if _, drained := s.draining[r.Address]; drained {
			delete(s.draining, r.Address)
			forget.drain(s, r.Address)
		}
		s.reals[r.Address] = true
	}
	return nil
}

// put adds or edits a virtual server, whichever it takes.
func (b *Backend) put(do Verb, v kernel.Virtual) error {
	err := b.config.Table.Virtual(do, v)
	switch {
	case do == Edit && errors.Is(err, kernel.ErrNotFound): // somebody deleted it
		return b.config.Table.Virtual(Add, v)
	case do == Add && errors.Is(err, ErrExists): // somebody was faster
		entry := b.newEntries()
		entry.virtual(v)
		return errors.Join(errForeign(v), entry.remove())
	}
	return err
}

// putReal adds or edits a real server, whichever it takes.
func (b *Backend) putReal(s *server, r kernel.Real) error {
	do, otherwise := Add, Edit
	if _, drained := s.draining[r.Address]; drained || s.reals[r.Address] {
		do, otherwise = otherwise, do
	}
	err := b.config.Table.Real(do, s.Virtual, r)
	if errors.Is(err, ErrExists) || errors.Is(err, kernel.ErrNotFound) {
		return b.config.Table.Real(otherwise, s.Virtual, r)
	}
	return err
}

// beginDrain lets go of what isn't wanted any more.
func (b *Backend) beginDrain(ctx context.Context, changes []kernel.VirtualChange, errs *errorsOf) error {
	entries := b.newEntries()
	deadline := b.config.Now().Add(b.config.DrainTimeout)
	for _, c := range changes {
		if s := b.servers[keyOf(c.Virtual)]; s != nil && drains(s) {
			for _, r := range c.Drain {
				entries.drainUntil(s, r.Address, deadline)
			}
		}
	}
	if err := entries.insert(); err != nil {
		return err
	}
	var begun []*server
	for _, c := range changes {
		if err := ctx.Err(); err != nil {
			return err
		}
		s := b.servers[keyOf(c.Virtual)]
		if s == nil || !c.Remove && len(c.Drain) == 0 {
			continue
		}
		s.removed = c.Remove
		for _, r := range c.Drain {
			err := b.letGo(s, r.Address, deadline)
			if err == nil {
				errs.applied.Virtuals++
			}
			errs.add(c.Owner, err)
		}
		begun = append(begun, s)
	}
	return b.finish(begun, errs)
}

// drains reports whether real servers of s are let go of bit by bit. UDP's go at
// once: there is no telling when a flow ends, and the kernel moves it to another
// real server (net.ipv4.vs.expire_nodest_conn).
func drains(s *server) bool { return s.Protocol != service.UDP }

// letGo begins to drain a real server.
func (b *Backend) letGo(s *server, a netip.AddrPort, deadline time.Time) error {
	if !drains(s) {
		if s.removed {
			return nil // goes with the virtual server
		}
		err := b.config.Table.Real(Delete, s.Virtual, kernel.Real{Address: a})
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return err
		}
		delete(s.reals, a)
		return nil
	}
	err := b.config.Table.Real(Edit, s.Virtual, kernel.Real{Address: a})
	if err != nil && !errors.Is(err, kernel.ErrNotFound) {
		return err
	}
	delete(s.reals, a)
	s.draining[a] = deadline // or gone already, as will be found
	return nil
}
