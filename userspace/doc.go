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
// endpoint when a connect fails, and then moves bytes. Nothing in a loop waits but
// the loop itself, for events of its sockets (epoll(7), edge-triggered):
//
//	listeners ──accept──> acceptor ──place──> tcpConn   phase dialing
//	                                             │       dial, dialed, again
//	                                             v
//	client side <──pump── endpoint side                 phase relaying
//	client side ──pump──> endpoint side                  relay, direction
//	                                             │
//	                                             v
//	reset once what was sent has arrived                 phase leaving
//
// An event says only that a side has changed. Its flags (readable, writable) say
// until when a call is worth its while, and a pump goes on until one of them is
// used up or its turn is: then it is the next connection's, and this one is
// resumed after the events. A pump copies small messages by way of one buffer of the
// loop's, and splices bulk (splice(2)), so that it doesn't enter this process,
// through a pipe that it borrows for as long. Time-outs are in a heap, and others ask
// for something by post, which rings the loop's eventfd.
//
// A loop's system calls return soon and the Go scheduler doesn't hear of them
// (syscalls.go says why); GOMAXPROCS is raised by the number of loops for it.
//
// UDP: one worker for each processor has a socket at the shared port, among
// which the kernel distributes clients, and the sessions of its clients, each with a
// connected socket of its own. It receives and sends many datagrams with one system
// call, and those of one client as a train (UDP_GRO, UDP_SEGMENT). It never waits for
// a client, an endpoint or a lookup.
//
// All methods of a Server are safe for concurrent use.
package userspace
