// Package kernel has the contract of all that programs the kernel ([Driver], [Steering],
// [Plane]), and what drivers by iptables, ipset and IPVS share: the [Ruleset] that a plan is
// rendered as, [Diff] between two, and the [Backend] that applies it.
//
// Rendering and Diff are pure. Apply decides nothing and reports what took effect. Drivers
// have packages of their own; this package never imports them.
package kernel
