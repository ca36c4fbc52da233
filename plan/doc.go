// Package plan is the only place that decides: which endpoints a service port
// uses, which data plane carries it and why, what is refused or dropped, what
// is masqueraded, and when a service moves between data planes.
//
// [Compute] is pure: everything it knows, the time included, is in its
// [Inputs], and equal inputs give equal plans. Renderers, the userspace
// forwarder and the status output read the [Plan] and decide nothing.
//
// Where the specification leaves a choice: an endpoint of weight 0 counts as
// one that doesn't exist, so a service whose endpoints all have weight 0 is
// refused like one without endpoints; plain round robin ignores other weights;
// a service whose endpoints are all down qualifies for nothing until one is up,
// but isn't recalled for it; a service that loses all its endpoints and gets
// new ones needn't qualify again; a pin or a specification that the kernel
// can't express wipes out the back-off.
//
// Services whose endpoints are in an excluded network are another proxy's: see
// Policy.ExcludeCIDRs.
//
// Which kernel data plane has rules for a service is decided per service by
// comparing [Abilities] with its specification: mode auto takes the preferred kernel data plane, unless the
// second falls short of it in less. Which endpoints
// there are just now plays no part in it, so that a service doesn't change
// sides with every one that comes or goes.
//
// A Plan is immutable once Compute has returned it and safe for concurrent use.
package plan
