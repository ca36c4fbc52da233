// Package netfilter follows a packet through what is in the kernel's netfilter:
// the rules of both variants of iptables and native nftables, with their
// counters, and ipsets. Everything is read back from the kernel; nothing is
// rendered from a plan, and nothing is changed.
//
// [Read] makes a [Tables], a value; [Tables.Walk] follows a [Packet] through the
// base chains of one hook, in the kernel's order. Rules of chance (statistic)
// give several outcomes with their exact probabilities. A match that can't be
// decided, because this package doesn't know it or because it hangs on more than
// the packet (limit, recent, time), makes "maybe": both ways are followed, and
// what comes of them is marked as uncertain. Nothing is ever guessed.
//
// What a walk doesn't do: routing, IPVS, sockets that receive. They lie between
// hooks, see [Span] for those that lie between the base chains of one hook.
//
// A Tables is for one goroutine at a time: it reads sets when a rule first asks
// for them.
package netfilter
