package kernel

import (
	"net/netip"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Explainer is what a data plane implements that chooses endpoints in the kernel by
// something other than rules of netfilter. Its methods read the network namespace of the
// calling thread, change nothing, and may be used from several goroutines at once.
type Explainer interface {
	// Explain returns what takes a client's new connections to an address, also if another
	// program made it; nil if nothing does.
	Explain(p service.Protocol, at netip.AddrPort, client netip.Addr) (*Balancer, error)
	// Compare returns how what is at an address differs from what want has there.
	Compare(want *Ruleset, p service.Protocol, at netip.AddrPort) ([]Mismatch, error)
}

// Comparer is a Plane that compares what the kernel holds with what is wanted.
type Comparer interface {
	// Compare returns how the kernel's objects of family f for the services of one differ, and
	// those that all services share. It changes nothing and may be called at any time.
	Compare(one *plan.Plan, f service.Family) ([]Mismatch, error)
}

// Balancer distributes the new connections to an address.
type Balancer struct {
	Plane          plan.DataPlane
	Name           string // of the mechanism, as steps of a trace name it
	Text           string // as the kernel's tool prints it
	Packets, Bytes uint64
	Targets        []BalancerTarget
	Note           string // what couldn't be read
}

// BalancerTarget is an endpoint of a Balancer.
type BalancerTarget struct {
	Address        netip.AddrPort
	Text           string
	Weight         uint32  // 0: it takes no new connections
	Share          float64 // of the client's new connections, 0..1
	Why            string  // the share is that
	Packets, Bytes uint64
}

// Mismatch is a difference between the plan and the kernel.
type Mismatch struct {
	Object  string `json:"object"`
	Planned string `json:"planned"`
	Kernel  string `json:"kernel"`
}
