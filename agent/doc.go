// Package agent wires the stages together and runs them.
//
// Two loops share the work. The fast loop turns every change into a plan and
// carries it out where that takes microseconds: the userspace forwarder, the
// membership of the portal's sets, conntrack. The slow loop (the programmer)
// brings the kernel rules that lie beneath to the latest plan, however long
// the tables take, and reports what is programmed back to the fast loop. While
// it works, the services it changes are served in userspace.
//
// The heartbeat keeps the portal's alive sets filled for as long as the
// forwarder proves that it serves.
package agent
