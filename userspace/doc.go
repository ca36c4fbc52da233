// Package userspace forwards connections in this process: the data plane that
// every service starts in and falls back to.
//
// One TCP port and one UDP port, the same number in both families, serve all
// services. Steering rules redirect a service's new connections there,
// and the kernel is asked where they were headed (the original destination).
// What was not redirected, or was headed to something no plan knows, is
// refused: the listeners are neither a loop nor an open relay.
//
// A [Server] decides nothing: a [plan.Plan] says which endpoints a connection
// may go to, whether the client's address is kept, and which clients may connect. Prepare
// adds the services of a plan, Commit removes those that it doesn't have.
//
// TCP: one event loop for each processor accepts, connects, tries another
// endpoint when a connect fails, and then moves bytes. A loop waits for nothing but
// events of its sockets (epoll(7), edge-triggered):
//
//	listeners ──accept──> acceptor ──assign──> tcpConn   phase dialing
//	                                              │       dial, dialed, again
//	                                              v
//	client side <──pump── endpoint side                  phase relaying
//	client side ──pump──> endpoint side                   relay, direction
//	                                              │
//	                                              v
//	reset once what was sent has arrived                  phase leaving
//
// An event says only that a side has changed. The side's flags (readable, writable) say
// until when a call is worth its while, and a pump goes on until one of them is
// used up or its turn is over: then it is the next connection's turn, and this one is
// resumed after the events. A pump copies small messages through one buffer of the
// loop's, and splices bulk (splice(2)), which so doesn't enter this process,
// through a pipe that it borrows for as long. Time-outs are in a heap. Other goroutines ask
// a loop by post, which wakes it up through its eventfd.
//
// A loop's system calls return soon and the Go scheduler doesn't hear of them
// (syscalls.go says why); GOMAXPROCS is raised by the number of loops for it.
//
// UDP: one worker for each processor has a socket at the shared port, among
// which the kernel distributes clients, and the sessions of its clients, each with a
// connected socket of its own. It receives and sends many datagrams with one system
// call, and those of one session as segments of one message (UDP_SEGMENT). It never waits for
// a client, an endpoint or a lookup.
//
// Room: file descriptors, UDP sessions and what sockets hold in the kernel are bounded. Where one of
// them is short, connections and sessions beyond their client's share give way (shed.go).
//
// Takeover: a Server in another process goes on with all that one has (handover.go, takeover.go; package
// handover is what it is told):
//
//	Listeners ─────────> Inherit, Prepare: clients still come to the one before
//	HandOver ──────────> TakeOver: both are still, so that either may go on
//	Release or Resume    Run, as soon as it is certain that the other one doesn't resume
//
// What makes that possible is the end of a turn: a loop has no byte then that isn't in a socket, a pipe or a
// connection's own buffer, and a worker no datagram. Descriptors are copied, so no peer hears of one of the two being closed.
//
// All methods of a Server are safe for concurrent use.
package userspace
