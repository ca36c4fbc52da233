// Package probe finds out whether endpoints are up: the TCP, HTTP, UDP and
// gRPC probes ([Network]) and the [Scheduler] that runs them and publishes
// what they find as a [health.View].
//
// The Scheduler has one goroutine of its own and one for each probe that is
// under way, of which there are at most Config.Workers. A probe of an endpoint
// that answers takes well under a millisecond, so 10,000 endpoints every 2s
// keep a handful busy. What fills the pool is endpoints that don't answer:
// each holds a slot for its whole time-out, share = time-out / interval. 1,000
// of 10,000 that hang for 1s every 2s hold 500 slots. Such slow targets may
// hold three quarters of the slots at most (768 by default, enough for 1,536
// that hang for 1s every 2s); beyond that they are probed less often, in turn,
// and targets that answer keep their cadence in the quarter that's left. UDP
// endpoints that are up without answering are slow as well: where there are
// thousands of them, a short time-out (a few round trips) keeps their cadence.
//
// Config.Rate bounds what all this costs, however many Targets there are and
// however often they are to be probed. Namespaces share it: one that asks for more
// than the others leave is probed less often, and they are not. Targets that were
// never probed count as slow, so that new ones that hang don't hold up what is
// known to answer.
//
// UDP servers needn't answer, and most don't answer what they don't understand,
// so silence is no failure: it keeps up what is up, and makes up what was
// unknown. A host that is gone without a trace therefore counts as up; only checks
// that want an answer find that. Nor is silence proof of life. Linux sends at
// most one ICMP error a second to a peer by default (net.ipv4.icmp_ratelimit),
// for all its ports together, and errors get lost: Fall of them in a row are
// seen if the interval is above a second and few ports of a host are probed.
// So that a dead endpoint isn't called up between two errors, what is down
// comes up only with a datagram in return, or after max(5, 2*Rise) silent
// probes in a row, each from a socket and source port of its own.
//
// A probe that fails for want of something on this host (file descriptors,
// memory, ports, a permission) doesn't count against the endpoint.
package probe
