package ipvs

import (
	"errors"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
)

// ErrExists says that what was to be added is there.
var ErrExists = errors.New("exists")

// Table is the kernel's table of virtual servers, everybody's. Implementations
// are safe for concurrent use.
type Table interface {
	// List returns virtual servers in order ([kernel.CompareVirtuals]): all of
	// them, or those of the ones given that exist. Those by firewall mark, and of
	// protocols that kproxy doesn't know, are left out.
	List(of ...kernel.Virtual) ([]Server, error)
	// Glance is List of all, but SchedFlags and Persistence may be missing, and so
	// may virtual servers. It is the cheapest way to see that everything is there;
	// what it doesn't show, List does.
	Glance() ([]Server, error)
	// Change carries out requests in order, and returns the error of each: one that
	// fails keeps none from the next. A scheduler that the kernel doesn't have is an
	// [ErrScheduler].
	Change(requests ...Request) []error
}

// ErrScheduler says that the kernel doesn't have a scheduler.
var ErrScheduler = errors.New("no such scheduler")

// ErrForeignLink says that somebody else has a link of the name of kproxy's.
var ErrForeignLink = errors.New("link " + kernel.DummyLink + " is somebody else's")

// Server is a virtual server as the kernel has it.
type Server struct {
	kernel.Virtual // without Owner; Reals in order of address
	// Connections are how many each of Reals has, active and inactive ones.
	Connections []int
}

// Link is [kernel.DummyLink]. Implementations are safe for concurrent use.
type Link interface {
	// State reads the link. One of the same name that isn't a dummy link is an
	// [ErrForeignLink].
	State() (LinkState, error)
	// Ensure makes the link unless it exists, and sets it up.
	Ensure() error
	// Add puts addresses on the link. That one is there already is no error. It
	// goes on after errors, each of which is an [*AddressError].
	Add(addresses ...netip.Addr) error
	// Delete takes addresses off the link, in the same way. That one isn't there
	// is no error.
	Delete(addresses ...netip.Addr) error
	// Remove removes the link. That there is none is no error.
	Remove() error
}

// LinkState is what is known of the link.
type LinkState struct {
	Exists bool
	Up     bool
	// Addresses are sorted, without link-local ones, which the kernel adds itself.
	Addresses []netip.Addr
}

// AddressError is an address that couldn't be added or deleted.
type AddressError struct {
	Address netip.Addr
	Err     error
}

func (e *AddressError) Error() string { return "address " + e.Address.String() + ": " + e.Err.Error() }

func (e *AddressError) Unwrap() error { return e.Err }
