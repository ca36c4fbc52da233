// Package leftovers finds what kube-proxy has left in the kernel of a node where
// kproxy takes its place, and removes it when asked: its chains and the jumps to
// them, in both variants of iptables; its nftables tables; its virtual servers,
// its dummy link, and its ipsets.
//
// kube-proxy leaves all of that when it ends, so that traffic goes on. kproxy
// works besides, but rules of services that no longer exist stay for ever, and
// those that do are served by the proxy whose rules come first.
//
// What kubelet or others own stays, also where its name begins in the same way,
// and so does a chain of kube-proxy's that others' rules lead to, with
// these rules. Of the rules in built-in chains and of the virtual servers only
// those go that kube-proxy makes in just that way, or that its ipsets name.
//
// Nothing here is safe for concurrent use.
package leftovers
