package source

import "net/netip"

// Status is what is known of one place that objects come from: a configured
// path, or the Kubernetes API.
type Status struct {
	Name   string   // the path, or the API server's URL
	Synced bool     // it has been read at least once
	Errors []string // what is wrong now, a line each: "file:line: what" of a file

	// ServiceNetworks are those cluster IPs are from, where the place says so.
	ServiceNetworks []netip.Prefix
}
