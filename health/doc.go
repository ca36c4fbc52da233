// Package health holds what is known about endpoints' health: the immutable
// [View] and the pure rise/fall machine that makes it. It opens no sockets;
// probes live in health/probe.
package health
