// Package conntrack reads and edits the kernel's connection tracking table
// (ctnetlink, linux/netfilter/nfnetlink_conntrack.h), which knows where every
// connection was headed before a rule rewrote its destination.
//
// It serves four ends:
//
//   - [Client.LookupAll] tells the userspace forwarder where a redirected datagram
//     was headed. It is on the path of the first datagram of every session.
//   - [Stale] names the UDP entries that would lead datagrams to a gone
//     endpoint, a deleted service or the wrong data plane, and [Client.Delete]
//     deletes exactly those. [HalfOpen] names the TCP entries of connections that wait
//     for an endpoint which isn't used any more, or that were begun before there was
//     a service; established ones end by themselves. [Client.DeleteUnanswered] has the
//     kernel look for those of an endpoint.
//   - A [Listener] tells which entries end, and [Client.Restore] puts back those that
//     vanished under a connection of userspace.
//   - [Accounting] counts, per service port and endpoint, what the kernel
//     carries. It counts only connections that the kernel rewrote to an
//     endpoint: those that go through the userspace forwarder end at its
//     listener, and the forwarder's own connections to endpoints aren't rewritten.
//
// Stale and the bookkeeping of Accounting are pure. A Client is bound to the
// network namespace of the thread that called [Dial]; it and Accounting are
// safe for concurrent use.
package conntrack
