// Package userspace forwards connections in this process: the data plane that
// every service starts in and falls back to.
//
// One TCP port and one UDP port, the same number in both families, serve all
// services. The kernel's portal redirects a service's new connections there,
// and the kernel is asked where they were headed (the original destination).
// What was not redirected, or was headed to something no plan knows, is
// refused: the listeners are neither a loop nor an open relay.
//
// A [Server] decides nothing: a [plan.Plan] says which endpoints a connection
// may go to, whether the client's address is kept, and who may connect. Prepare
// takes up what a plan adds, Commit lets go what it doesn't hold any more.
//
// TCP: one event loop for each processor accepts, connects, tries another
// endpoint when a connect fails, and then moves bytes: small messages are copied,
// bulk is spliced (splice(2)), so that it doesn't enter this process. Nothing in a
// loop waits. UDP: one worker for each processor has a socket at the shared port, among
// which the kernel distributes clients, and the sessions of its clients, each with a
// connected socket of its own. It receives and sends many datagrams with one system
// call, and those of one client as a train (UDP_GRO, UDP_SEGMENT). It never waits for
// a client, an endpoint or a lookup.
//
// All methods of a Server are safe for concurrent use.
package userspace
