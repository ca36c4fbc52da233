// Package lab builds a small network on this machine, in network namespaces:
// one client, one node and some backends, which are pods of the node. `kproxy lab`
// shows kproxy in it, and the end-to-end tests send their packets through it.
//
// # Topology
//
// How backends are linked to the node is Config.Topology. This is [Routed]:
//
//	<prefix>-client            <prefix>-node                      <prefix>-b1, -b2, …
//	  eth0 10.1.0.2/24  ─────  client 10.1.0.1/24
//	       fd00:1::2/64               fd00:1::1/64
//	                           b1     10.2.0.1/32    ───────────  eth0 10.2.0.2/32 (b2: 10.2.0.3, …)
//	                                  fd00:2::1/128                    fd00:2::2/128 (b2: fd00:2::3, …)
//	                           host   198.18.x.y/30  ───────────  a link in the caller's namespace (only with HostAccess)
//
// The client namespace has Config.Clients addresses: 10.1.0.2, 10.1.0.3, … and
// fd00:1::2, fd00:1::3, …. Backends sit in [PodCIDR4] and [PodCIDR6], one host
// route each, so two backends talk to each other through the node as well. The
// other topologies differ in the node's end:
//
//	bridge      b1, b2, … are ports of the bridge cni0, which has 10.2.0.1/24 and fd00:2::1/64; so
//	            have backends, and what they send each other doesn't pass the node's routes
//	unnumbered  b1, b2, … have no address but fe80::ecee:eeff:feee:eeee/64, and proxy ARP; backends
//	            have their default routes by that and by 169.254.1.1
//	loopback    as unnumbered, but lo has 10.2.0.1/32 and fd00:2::1/128, which default routes go by
//
// Client and backends have their default route through the node and forward
// nothing. The node's default route leads to the client, which drops what isn't
// its own: without rules, packets to a service address vanish, as they do on a
// node whose router doesn't know the address. IPv6 duplicate address detection
// is off, so addresses work at once.
//
// With HostAccess the node is reached from the caller's namespace at
// [Network.HostAddress], in a /30 of 198.18.0.0/15 (RFC 2544, never routed)
// that is picked by the prefix.
//
// Services use 10.96.0.0/12 and fd00:96::/112 by convention ([Manifest]).
//
// # Names
//
// Namespaces are bind mounts in /run/netns, so `ip netns exec <prefix>-client …`
// works while a lab is up. [Network.Up] removes what an earlier lab with the
// same prefix left behind; [DownAll] does only that. Both end the processes in
// those namespaces.
//
// # Concurrency
//
// All types are safe for concurrent use once [Network.Up] has returned, except
// that Up and Down of one prefix must not overlap.
package lab
