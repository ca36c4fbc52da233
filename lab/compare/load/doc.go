// Package load makes the traffic that `kproxy lab compare` measures: a client
// that loads a service in one of a few ways ([Run]), and the server behind it
// ([Serve]). Each runs as a process of its own, so that what they cost is told
// apart from what the proxy between them costs.
//
// Both use blocking sockets, one thread each, without Go's network poller: its
// wake-ups take longer than what is to be measured does. Every load is bounded
// in time and in count, and every wait on a socket by [socketTimeout].
//
// The processors' time is read at the start and at the end of the load, in the
// client: [CPU] says what of it went where.
package load
