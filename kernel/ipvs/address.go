package ipvs

import (
	"errors"
	"net/netip"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

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
		// virtual servers could not be made, somebody else may.
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
