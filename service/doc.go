// Package service holds what is wanted: service ports, their endpoints and the
// node, as plain values with net/netip inside.
//
// Sources (files, the Kubernetes API) feed a [Builder]; everything downstream
// reads the [Snapshot] it builds. A Snapshot never changes after Build, so it
// may be read from any goroutine without a lock.
//
// The package imports the standard library only.
package service
