// Package kube follows the Kubernetes API: Services, EndpointSlices, and this
// node's Node.
//
// There is one watch of each, resumed where it broke off; nothing is polled.
// Objects are trimmed to what source.Build reads before they are kept. While
// the API can't be reached, what it last said stays in force, and Status says
// which watch fails and since when. When it is back, the watches catch up, and
// Snapshots receives a value only if something has changed.
//
// A change is converted alone: its Service anew, everything else shared with
// the Snapshot before. So one endpoint among 100,000 costs milliseconds.
//
// [Open] reads the configuration, connects to nothing, and returns a [ConfigError]
// that names the file. [Source.Run] does the rest; a Source's other methods are
// safe for concurrent use at any time.
package kube
