// Package ipvs renders a plan as virtual servers of the kernel's IPVS, service
// addresses on kproxy's dummy link, sets and a few rules, reads back what the
// kernel holds, and applies the difference, for both address families.
//
// A service address is on [kernel.DummyLink], so packets to it are delivered to
// this node, where IPVS takes them (at LOCAL_IN; those of the node's own clients
// at LOCAL_OUT) and rewrites their destination. Node ports are virtual servers
// on the node's own addresses. Everything that depends on the service is a
// virtual server or an entry of a set; the rules are the same however many
// services there are.
//
// # What is kproxy's
//
// Netlink has no room for a name on a virtual server, so sets hold the record:
// [kernel.SetVirtual] of virtual servers, [kernel.SetVIP] of addresses on the
// link, [kernel.SetDrain] of real servers that drain; real servers that are in
// use are in [kernel.SetEndpoint]. An entry is made before its object and
// removed after it, so that a crash between the two leaves an entry without an
// object, which is harmless, and never an object without an owner. Virtual
// servers, real servers and links of others are never touched; a virtual server
// that kproxy made in which others have a real server stays as long as that
// does. The link itself is kproxy's with every address on it.
//
// # Draining
//
// A real server that isn't wanted any more gets weight 0 and goes when its
// connections are gone or the drain time-out has passed, at once if it has none
// or is UDP's, where the kernel moves flows to another real server by itself
// (expire_nodest_conn). The deadline is the remaining time of its entry in
// [kernel.SetDrain] less [DrainSlack], so a drain goes on after a restart. A
// virtual server that isn't wanted any more goes with the last of its real
// servers, and its address with the last virtual server.
//
// # Concurrency
//
// A [Backend] belongs to one goroutine, as [kernel.Backend] says. A [Watch] may
// be used by another one.
package ipvs
