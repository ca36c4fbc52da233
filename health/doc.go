// Package health holds what is known about endpoints' health: the immutable
// [View] and the pure rise/fall [Machine] that makes it. It opens no sockets;
// probes live in health/probe. [Ejection] is the passive counterpart: what the
// connects that clients cause tell about an endpoint.
package health
