// Package passive finds endpoints that don't answer by what happens to clients' own packets, where no active check
// asks: the kernel logs a SYN that comes a second time, userspace tells of connects that fail.
//
// That proves little: a policy may forbid this one client, or a packet was lost. So it only says what to probe. A
// [Detector] then connects to that endpoint itself. Silence, and no other client that was answered meanwhile, ejects
// the endpoint: it gets no new connections of this node until it answers a probe. Endpoints that no client complains of
// are never asked, but for those on a node that seems to be dead, and a few on other nodes to tell that from this
// node's being cut off.
//
// Endpoints that have left the API take connections along. A Detector asks their hosts, and names those that stay
// silent, so that their connections can be reset instead of hanging for a quarter of an hour.
package passive
