// Package plan is the only place that decides: which endpoints a service port
// uses, which data plane carries it and why, what is refused or dropped, what
// is masqueraded, and when a service moves between data planes.
//
// [Compute] is pure: everything it knows, the time included, is in its
// [Inputs], and equal inputs give equal plans. Renderers, the userspace
// forwarder and the status output read the [Plan] and decide nothing.
//
// A Plan is immutable once Compute has returned it and safe for concurrent use.
package plan
