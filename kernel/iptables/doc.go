// Package iptables renders a plan as chains, reads back what the kernel holds,
// and applies the difference, for both variants of iptables (nft and legacy)
// and both address families.
//
// A new connection passes, in the nat table:
//
//	KPROXY-SERVICES    kproxy's own connections leave at once
//	├─ KPROXY-PORTAL   while a live kproxy serves: redirected to userspace, if in a USER set
//	├─ KPROXY-VIRTUAL  where IPVS is in use: marked, if to one of its virtual servers (kernel/ipvs)
//	├─ KPROXY-DISPATCH a tree of chains over the destination address, at most 8 rules each
//	│    └─ KPROXY-SVC-…  one DNAT rule per endpoint (KPROXY-LOC-… for local endpoints only)
//	│       KPROXY-EXT-…  in front of it, where some clients are masqueraded or treated apart
//	│       KPROXY-SEP-…  behind it, one per endpoint, where clients stay with their endpoint
//	└─ KPROXY-NODEPORTS the same over the port number, on the node's own addresses
//
// What all services share is kernel/steering's.
//
// [Render] is pure and prints rules as iptables-save does, so that what was
// read back can be compared. Nothing but the jumps lies in foreign chains.
package iptables
