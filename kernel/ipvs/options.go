package ipvs

import "kproxy.dev/kproxy/kernel"

// Options is what rules depend on besides the plan.
type Options struct {
	Marks kernel.Marks
	// CatchRefusals says that the host has xt_connbytes and counts packets
	// (net.netfilter.nf_conntrack_acct), so that a connection which an endpoint
	// refuses can go to another.
	CatchRefusals bool
	// SkipIPv6 renders nothing for IPv6, for hosts without ip6tables.
	SkipIPv6 bool
}

// DefaultOptions returns options for a host that has everything.
func DefaultOptions() Options {
	return Options{Marks: kernel.DefaultMarks(), CatchRefusals: true}
}

// Validate reports every problem.
func (o Options) Validate() error { return o.Marks.Validate() }
