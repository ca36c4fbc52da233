package iptables

import (
	"errors"
	"fmt"

	"kproxy.dev/kproxy/kernel"
)

// Options is what rules depend on besides the plan.
type Options struct {
	Marks   kernel.Marks
	TCPPort uint16 // of the shared listener
	UDPPort uint16
	// RandomFully masquerades with random source ports (iptables 1.6.2, Linux 3.13).
	RandomFully bool
	// SocketMatch says that the host has xt_socket, which transparent upstream
	// connections need.
	SocketMatch bool
	// CatchRefusals says that the host has xt_connbytes and counts packets
	// (net.netfilter.nf_conntrack_acct), so that a connection which an endpoint
	// refuses can go to another.
	CatchRefusals bool
	// DropInvalid drops packets of endpoints that conntrack takes for invalid. It
	// must not where the host has conntrack be liberal
	// (net.netfilter.nf_conntrack_tcp_be_liberal).
	DropInvalid bool
	// SkipIPv6 renders nothing for IPv6, for hosts without ip6tables.
	SkipIPv6 bool
	// SlotLimit bounds the rules of a weighted service's chain. Weights that
	// need more are rounded to the closest split.
	SlotLimit int
}

// DefaultOptions returns options for a host that has everything. The
// listener's ports are the caller's to fill in.
func DefaultOptions() Options {
	return Options{Marks: kernel.DefaultMarks(), RandomFully: true, SocketMatch: true, CatchRefusals: true, DropInvalid: true, SlotLimit: 64}
}

// Validate reports every problem.
func (o Options) Validate() error {
	var errs []error
	if err := o.Marks.Validate(); err != nil {
		errs = append(errs, err)
	}
	if o.TCPPort == 0 || o.UDPPort == 0 {
		errs = append(errs, fmt.Errorf("check listener ports: TCP %d and UDP %d must both be known", o.TCPPort, o.UDPPort))
	}
	if o.SlotLimit < 1 {
		errs = append(errs, fmt.Errorf("check slot limit: %d isn't positive", o.SlotLimit))
	}
	return errors.Join(errs...)
}
