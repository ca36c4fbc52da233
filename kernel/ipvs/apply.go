package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
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
	for part := range slices.Chunk(changes, changesAtOnce) {
		if err := ctx.Err(); err != nil {
			return err
		}
		b.setReals(b.setVirtuals(part, &errs), forget, &errs)
	}
	if err := forget.remove(); err != nil {
		return multierror.Append(errs.all, err)
	}
	if err := b.beginDrain(ctx, changes, &errs); err != nil {
		return multierror.Append(errs.all, err)
	}
	return errs.all.ErrorOrNil()
}

// errorsOf sorts errors: those of a service concern only that, but a lack of
// permission concerns all.
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
	return fmt.Errorf("there is a virtual server at %s %s that isn't kproxy's, and kproxy leaves it alone; if it is not needed: ipvsadm -D %s %s",
		v.Protocol, v.Address, flagOf[v.Protocol], v.Address)
}

// changesAtOnce is how many virtual servers are made or changed before their real
// servers are: new ones have none for so long.
const changesAtOnce = 64

// setVirtuals makes or changes virtual servers, and returns the changes that may go on.
func (b *Backend) setVirtuals(changes []kernel.VirtualChange, errs *errorsOf) []kernel.VirtualChange {
	var requests []Request
	var of []kernel.VirtualChange
	var out []kernel.VirtualChange
	for _, c := range changes {
		s := b.servers[keyOf(c.Virtual)]
		switch {
		case c.Remove:
		case s == nil:
			requests, of = append(requests, Request{Do: Add, Virtual: c.Virtual}), append(of, c)
		case c.Settings:
			requests, of = append(requests, Request{Do: Edit, Virtual: c.Virtual}), append(of, c)
		default:
			s.Virtual, s.removed = c.Virtual, false
			out = append(out, c)
		}
	}
	for i, err := range b.config.Table.Change(requests...) {
		c := of[i]
		if err = b.putOtherwise(requests[i], err); err != nil {
			errs.add(c.Owner, err)
			continue
		}
		s := b.servers[keyOf(c.Virtual)]
		if s == nil {
			s = newServer(c.Virtual)
			b.servers[keyOf(c.Virtual)] = s
		}
		s.Virtual, s.removed = c.Virtual, false
		errs.applied.Virtuals++
		out = append(out, c)
	}
	return out
}

// putOtherwise returns the error that is left of a request's: what was to be edited is
// added where it was deleted, a real server that is there is edited, and a virtual server
// that another program has added is left to it.
func (b *Backend) putOtherwise(r Request, err error) error {
	switch {
	case r.Do == Edit && errors.Is(err, kernel.ErrNotFound): // it was deleted
		r.Do = Add
		return one(b.config.Table, r)
	case r.Do == Add && errors.Is(err, ErrExists) && r.ofReal():
		r.Do = Edit
		return one(b.config.Table, r)
	case r.Do == Add && errors.Is(err, ErrExists): // another program was faster
		entry := b.newEntries()
		entry.virtual(r.Virtual)
		return errors.Join(errForeign(r.Virtual), entry.remove())
	}
	return err
}

// setReals adds or edits real servers that are in use.
func (b *Backend) setReals(changes []kernel.VirtualChange, forget *entries, errs *errorsOf) {
	var requests []Request
	var of []*server
	for _, c := range changes {
		s := b.servers[keyOf(c.Virtual)]
		for _, r := range c.Set {
			do := Add
			if _, drained := s.draining[r.Address]; drained || s.reals[r.Address] {
				do = Edit
			}
			requests, of = append(requests, Request{Do: do, Virtual: s.Virtual, Real: r}), append(of, s)
		}
	}
	for i, err := range b.config.Table.Change(requests...) {
		r, s := requests[i], of[i]
		if err = b.putOtherwise(r, err); err != nil {
			errs.add(s.Owner, err)
			continue
		}
		errs.applied.Virtuals++
		a := r.Real.Address
		if _, drained := s.draining[a]; drained {
			delete(s.draining, a)
			forget.drain(s, a)
		}
		s.reals[a] = true
	}
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
	begun, err := b.letGo(ctx, changes, deadline, errs)
	if err != nil {
		return err
	}
	return b.finish(begun, errs)
}

// drains reports whether real servers of s are let go of bit by bit. UDP's go at
// once: there is no telling when a flow ends, and the kernel moves it to another
// real server (net.ipv4.vs.expire_nodest_conn).
func drains(s *server) bool { return s.Protocol != service.UDP }

// letGo begins to drain real servers, and returns the virtual servers that something goes from.
func (b *Backend) letGo(ctx context.Context, changes []kernel.VirtualChange, deadline time.Time, errs *errorsOf) (begun []*server, err error) {
	var requests []Request
	var of []*server
	for _, c := range changes {
		s := b.servers[keyOf(c.Virtual)]
		if s == nil || !c.Remove && len(c.Drain) == 0 {
			continue
		}
		s.removed, s.Owner = c.Remove, c.Owner
		begun = append(begun, s)
		do := Edit // to weight 0
		if !drains(s) {
			if s.removed {
				errs.applied.Virtuals += len(c.Drain)
				continue // they go with the virtual server
			}
			do = Delete
		}
		for _, r := range c.Drain {
			requests = append(requests, Request{Do: do, Virtual: s.Virtual, Real: kernel.Real{Address: r.Address}})
			of = append(of, s)
		}
	}
	if err := ctx.Err(); err != nil {
		return begun, err
	}
	for i, err := range b.config.Table.Change(requests...) {
		s, a := of[i], requests[i].Real.Address
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs.add(s.Owner, err)
			continue
		}
		errs.applied.Virtuals++
		delete(s.reals, a)
		if drains(s) {
			s.draining[a] = deadline // or gone already, as will be found
		}
	}
	return begun, nil
}

// applyAddresses puts addresses on the link and takes others off it. One that a
// draining virtual server answers on stays until that is gone.
func (b *Backend) applyAddresses(toAdd, toDelete []netip.Addr, a *kernel.Applied) error {
	if len(toAdd)+len(toDelete) == 0 {
		return nil
	}
	at := b.byAddress()
	var fresh []netip.Addr
	for _, x := range toAdd {
		// With an address on the link, everything at it is kproxy's to answer. Where
		// virtual servers could not be made, another program may.
		if len(at[x]) > 0 || len(a.Failed) == 0 {
			fresh = append(fresh, x)
		}
	}
	if err := b.addAddresses(fresh, at, a); err != nil {
		return err
	}
	var unused []netip.Addr
	if b.linkDown && len(fresh) > 0 {
		b.linkDown = false
		for x, wanted := range b.addresses {
			if !wanted && !onlyRemoved(at[x]) {
				unused = append(unused, x) // Observe didn't tell of it
			}
		}
	}
	for _, x := range toDelete {
		if onlyRemoved(at[x]) {
			b.addresses[x] = false
			continue
		}
		unused = append(unused, x)
	}
	return b.deleteAddresses(unused, a)
}

// addAddresses records addresses and puts them on the link.
func (b *Backend) addAddresses(addresses []netip.Addr, at map[netip.Addr][]*server, a *kernel.Applied) error {
	if len(addresses) == 0 {
		return nil
	}
	entries := b.newEntries()
	for _, x := range addresses {
		entries.vip(x)
	}
	if err := entries.insert(); err != nil {
		return err
	}
	if err := b.config.Link.Ensure(); err != nil {
		return err
	}
	failed, err := b.config.Link.Add(addresses...)
	if err != nil {
		return err
	}
	errs := errorsOf{applied: a}
	for _, x := range addresses {
		if failed[x] == nil {
			b.addresses[x] = true
			a.Virtuals++
			continue
		}
		if len(at[x]) == 0 {
			errs.add(service.Key{}, failed[x])
		}
		for _, s := range at[x] {
			errs.add(s.Owner, failed[x])
		}
	}
	return errs.all.ErrorOrNil()
}

// deleteAddresses takes addresses off the link, then off the record. The link
// goes with the last of them.
func (b *Backend) deleteAddresses(addresses []netip.Addr, a *kernel.Applied) error {
	if len(addresses) == 0 {
		return nil
	}
	failed, err := b.config.Link.Delete(addresses...)
	if err != nil && !errors.Is(err, kernel.ErrNotFound) { // others may have deleted the link
		return err
	}
	var errs *multierror.Error
	entries := b.newEntries()
	for _, x := range addresses {
		if err := failed[x]; err != nil {
			errs = multierror.Append(errs, err)
			continue
		}
		delete(b.addresses, x)
		entries.vip(x)
		a.Virtuals++
	}
	errs = multierror.Append(errs, entries.remove())
	if errs.ErrorOrNil() == nil && len(b.addresses) == 0 {
		errs = multierror.Append(errs, b.config.Link.Remove())
	}
	return errs.ErrorOrNil()
}

// dropUnused takes addresses off the link that aren't wanted and that no virtual
// server answers on any more.
func (b *Backend) dropUnused(addresses []netip.Addr, a *kernel.Applied) error {
	if len(addresses) == 0 {
		return nil
	}
	at := b.byAddress()
	var unused []netip.Addr
	for _, x := range addresses {
		if wanted, on := b.addresses[x]; on && !wanted && len(at[x]) == 0 {
			unused = append(unused, x)
		}
	}
	return b.deleteAddresses(unused, a)
}
