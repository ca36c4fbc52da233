// Package nftables is a steering and a data plane of nftables alone, by netlink: no program
// is executed. kproxy has one table in each family. Services are elements of maps, not
// chains: there are as many rules as there are numbers of endpoints in use.
//
//	services   address . protocol . port → goto the chain of its treatment
//	pick-3     dnat to address . protocol . port . random number below 3 map @backends
//	backends   address . protocol . port . number → address . port of an endpoint
//
// A node port has the zero address in keys. Treatments differ in who is masqueraded, in
// whether pods use other endpoints, and in affinity; see [treatment]. An offload is an
// element less in the set userspace, a changed endpoint one in backends, and every change is
// one transaction; only what goes to an empty kernel, where nothing leads to it yet, is several.
//
// Endpoints are chosen at random, by rules that services share. A counter there would give
// services that are used in turn the same endpoint for ever; so one that asks for round
// robin has chains of its own, with a counter.
//
// The library is our own kernel/netlink. google/nftables makes an allocation for each
// expression and element, sends what exceeds an attribute's 64 kB cut short, without an error,
// and has no chunks; what we would spare is a table of constants. A rule's text and its
// expressions are made by the same calls (rule.go), so what is rendered is what nft lists.
//
// Traps: nft 1.0.6 aborts at rules in which one map's answer is part of another's key, or
// in which a rule adds concatenated data to a map (netlink_parse_concat_expr), so a number is
// kept in the packet's priority from one rule to the next. Kernels before 6.2 take a chain
// for busy until a moment after the transaction that ended its last use. Before 6.12 adding
// an element again doesn't renew its lifetime.
package nftables
