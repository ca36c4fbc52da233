package ipvs_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/service"
)

// modelTable is the [ipvs.Table] of a model host. Every operation may fail.
type modelTable struct {
	table  *kerneltest.IPVS
	faults *kerneltest.Faults
}

func (m modelTable) List(of ...kernel.Virtual) (out []ipvs.Server, err error) {
	err = m.faults.Netlink(func() error {
		out = nil
		for _, v := range m.table.List() {
			if len(of) > 0 && !slices.ContainsFunc(of, func(o kernel.Virtual) bool { return kernel.CompareVirtuals(o, v) == 0 }) {
				continue
			}
			s := ipvs.Server{Virtual: v}
			for _, r := range v.Reals {
				s.Connections = append(s.Connections, m.table.Connections(v, r.Address))
			}
			out = append(out, s)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (m modelTable) Glance() ([]ipvs.Server, error) { return m.List() }

func (m modelTable) Virtual(do ipvs.Verb, v kernel.Virtual) error {
	call := [...]func(kernel.Virtual) error{ipvs.Add: m.table.NewService, ipvs.Edit: m.table.SetService, ipvs.Delete: m.table.DelService}[do]
	err := m.faults.Netlink(func() error { return call(v) })
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w %s", ipvs.ErrScheduler, v.Scheduler)
	}
	return meaning(err)
}

func (m modelTable) Real(do ipvs.Verb, v kernel.Virtual, r kernel.Real) error {
	return meaning(m.faults.Netlink(func() error {
		switch do {
		case ipvs.Add:
			return m.table.NewDest(v, r)
		case ipvs.Edit:
			return m.table.SetDest(v, r)
		}
		return m.table.DelDest(v, r.Address)
	}))
}

// meaning is that of the kernel's error numbers.
func meaning(err error) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		return ipvs.ErrExists
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		return kernel.ErrNotFound
	case errors.Is(err, unix.EPERM):
		return kernel.ErrPermission
	}
	return err
}

// modelLink is the [ipvs.Link] of a model host. Every operation may fail.
type modelLink struct {
	links  *kerneltest.Links
	faults *kerneltest.Faults
}

func (m modelLink) State() (out ipvs.LinkState, err error) {
	err = m.faults.Netlink(func() error {
		out = ipvs.LinkState{}
		if out.Exists, out.Up = m.links.Exists(kernel.DummyLink); !out.Exists {
			return nil
		}
		var err error
		out.Addresses, err = m.links.Addresses(kernel.DummyLink)
		return err
	})
	if err != nil {
		return ipvs.LinkState{}, err
	}
	return out, nil
}

func (m modelLink) Ensure() error {
	err := m.faults.Netlink(func() error { return m.links.Add(kernel.DummyLink) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return m.faults.Netlink(func() error { return m.links.SetUp(kernel.DummyLink) })
}

func (m modelLink) Add(addresses ...netip.Addr) error {
	return m.each(addresses, unix.EEXIST, m.links.AddAddress)
}

func (m modelLink) Delete(addresses ...netip.Addr) error {
	return m.each(addresses, unix.EADDRNOTAVAIL, m.links.DelAddress)
}

func (m modelLink) each(addresses []netip.Addr, fine error, do func(string, netip.Addr) error) error {
	if exists, _ := m.links.Exists(kernel.DummyLink); !exists {
		return kernel.ErrNotFound
	}
	var errs *multierror.Error
	for _, a := range addresses {
		err := m.faults.Netlink(func() error { return do(kernel.DummyLink, a) })
		if err != nil && !errors.Is(err, fine) {
			errs = multierror.Append(errs, &ipvs.AddressError{Address: a, Err: meaning(err)})
		}
	}
	return errs.ErrorOrNil()
}

func (m modelLink) Remove() error {
	err := m.faults.Netlink(func() error { return m.links.Delete(kernel.DummyLink) })
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// intruder is a foreign real server for a virtual server of either family.
func intruder(v kernel.Virtual) kernel.Real {
	a := "203.0.113.99:9"
	if service.FamilyOf(v.Address.Addr()) == service.IPv6 {
		a = "[2001:db8:99::9]:9"
	}
	return kernel.Real{Address: netip.MustParseAddrPort(a), Weight: 3}
}

// faultyTable puts faults in front of a table.
type faultyTable struct {
	next   ipvs.Table
	faults *kerneltest.Faults
}

func (f faultyTable) List(of ...kernel.Virtual) (out []ipvs.Server, err error) {
	return f.read(func() ([]ipvs.Server, error) { return f.next.List(of...) })
}

func (f faultyTable) Glance() ([]ipvs.Server, error) { return f.read(f.next.Glance) }

func (f faultyTable) read(read func() ([]ipvs.Server, error)) (out []ipvs.Server, err error) {
	err = meaning(f.faults.Netlink(func() error {
		out, err = read()
		return err
	}))
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (f faultyTable) Virtual(do ipvs.Verb, v kernel.Virtual) error {
	return f.faults.Netlink(func() error { return f.next.Virtual(do, v) })
}

func (f faultyTable) Real(do ipvs.Verb, v kernel.Virtual, r kernel.Real) error {
	return f.faults.Netlink(func() error { return f.next.Real(do, v, r) })
}

// faultyLink puts faults in front of a link.
type faultyLink struct {
	next   ipvs.Link
	faults *kerneltest.Faults
}

func (f faultyLink) State() (out ipvs.LinkState, err error) {
	err = f.faults.Netlink(func() error {
		out, err = f.next.State()
		return err
	})
	if err != nil {
		return ipvs.LinkState{}, err
	}
	return out, nil
}

func (f faultyLink) Ensure() error { return f.faults.Netlink(f.next.Ensure) }

func (f faultyLink) Add(addresses ...netip.Addr) error { return f.each(addresses, f.next.Add) }

func (f faultyLink) Delete(addresses ...netip.Addr) error { return f.each(addresses, f.next.Delete) }

// each lets some addresses fail, and others not.
func (f faultyLink) each(addresses []netip.Addr, do func(...netip.Addr) error) error {
	var errs *multierror.Error
	for _, a := range addresses {
		if err := f.faults.Netlink(func() error { return do(a) }); err != nil {
			errs = multierror.Append(errs, &ipvs.AddressError{Address: a, Err: err})
		}
	}
	return errs.ErrorOrNil()
}

func (f faultyLink) Remove() error { return f.faults.Netlink(f.next.Remove) }
