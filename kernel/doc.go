// Package kernel is what every kernel data plane shares: the Ruleset that
// Render makes of a plan, the Diff between two, the Backend that applies it,
// and the portal, the few sets whose membership decides which data plane gets
// a service's new connections.
//
// Render and Diff are pure. Apply decides nothing and reports what took effect.
// The modes live in kernel/iptables and kernel/ipvs; this package never
// imports them.
package kernel
