// Package kernel is what every kernel data plane shares: the Ruleset that
// Render makes of a plan, the Diff between two, the Backend that applies it,
// and redirect sets, whose entries decide which data plane gets
// a service's new connections.
//
// Render and Diff are pure. Apply decides nothing and reports what took effect.
// Planes have packages of their own; this package never
// imports them.
package kernel
