package kernel

import (
	"context"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plane is a data plane of the kernel, or several that share a transaction. What it
// carries is decided in plans; it renders them, compares with what the kernel holds, and
// applies the difference. One goroutine calls its methods, but Check, which may be called
// at any time. A Plane may also be a [Drainer], a [Counter] and a [Renderer], and have a
// method Close.
type Plane interface {
	// Adopt reads what an earlier process left in the kernel, and returns the service
	// ports of s that it was serving there.
	Adopt(ctx context.Context, s *service.Snapshot) (map[service.Key]bool, error)
	// Want takes p, to which d leads from the plan before, as what Sync is to bring
	// about. It reports whether that is anything but what the last Sync failed to bring
	// about.
	Want(p *plan.Plan, d plan.Delta) bool
	// Sync brings the kernel to what is wanted. The first one begins with what leads to
	// userspace, and then calls steered: that takes a moment, the rules of all services
	// may take many seconds, or fail.
	Sync(ctx context.Context, steered func()) Result
	// Programmed returns the KernelHash of the rules that the kernel holds of what is
	// wanted, by service port; nothing while that isn't known.
	Programmed() map[service.Key]uint64
	// Check returns what others changed since the last Sync, a phrase each. The next Sync
	// reads everything back and mends it.
	Check(ctx context.Context) ([]string, error)
}

// Drainer is a Plane whose endpoints that aren't wanted any more keep the connections
// that they have.
type Drainer interface {
	// Drain removes what has drained, and returns how many endpoints still drain.
	Drain(ctx context.Context) (left int, err error)
}

// Counter is a Plane that counts what steering's rules see.
type Counter interface {
	Counts(ctx context.Context) (Counts, error)
}

// Result is what a Sync did.
type Result struct {
	Err    error
	Failed map[service.Key]error // service ports whose rules could not be written, with why
	// Tried: rules of services were written, or may have been. It is false where there
	// was nothing to do, and where it failed before.
	Tried bool
	// Steered: rules that lead to userspace were written before those of services.
	Steered bool
	Full    bool              // what is in the kernel had to be read before
	Applied Applied           // in all
	Holds   *Objects          // what the kernel holds now; nil where that isn't known
	Written [2]map[string]int // rules, by address family and table
}

// OK reports whether the kernel holds all that is wanted.
func (r *Result) OK() bool { return r.Err == nil && len(r.Failed) == 0 }

// Objects counts what the kernel holds, by address family.
type Objects struct {
	Rules           [2]map[string]int // by table
	Virtuals, Reals [2]int            // virtual and real servers
}

// Counts are packets that kproxy's rules have counted since they were written, of
// both address families.
type Counts struct {
	Invalid uint64 // of endpoints, dropped because conntrack can't place them
	Refused uint64 // that began a connection to a service without a usable endpoint, and were refused
	Steered uint64 // that began a connection and were sent to userspace
}

// Add adds what was counted between two readings. A counter that went back was
// written anew in between, and began at 0.
func (c *Counts) Add(was, is Counts) {
	add := func(sum *uint64, was, is uint64) {
		if is < was {
			was = 0
		}
		*sum += is - was
	}
	add(&c.Invalid, was.Invalid, is.Invalid)
	add(&c.Refused, was.Refused, is.Refused)
	add(&c.Steered, was.Steered, is.Steered)
}
