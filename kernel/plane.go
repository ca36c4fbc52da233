package kernel

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Driver is one way to program the kernel: a [Steering], and the data planes that work with
// it. A process opens one driver, chosen by mode and host; to add a data plane with a
// steering of its own is to implement this. It is used by one goroutine. Nothing is opened
// before Probe, Load or Remove.
type Driver interface {
	// Probe finds out what the host has of the data planes that mode m may use. With trial
	// it leaves no trace: it tries things in a network namespace that is gone after, and
	// has the kernel load no data plane. The error is only about ctx.
	Probe(ctx context.Context, m plan.Mode, trial bool) (Facts, error)
	// Load has the kernel load what data planes of m need besides steering, and returns
	// which of those data planes the host has. Nothing else changes.
	Load(ctx context.Context, m plan.Mode) ([]plan.Capability, error)
	// Assume takes the host to have everything, without a look.
	Assume()
	// Planes names the driver's data planes, in order of preference.
	Planes() []plan.DataPlane
	// Abilities returns those of the driver's data planes, in order of preference, for the
	// services of a snapshot; nil for none.
	Abilities(s *service.Snapshot, now time.Time) []plan.Abilities
	// Sysctls returns the settings that those data planes need which Probe or Load found.
	Sysctls() []Sysctl

	// Steering returns the driver's steering. It changes nothing.
	Steering(s Settings) (Steering, error)
	// Plane returns the driver's data planes as one, which the slow loop drives: those
	// that the mode may use, and those of which an earlier process left something, which
	// is to go. It may change settings, and writes no rules.
	Plane(s Settings) (Plane, error)

	// Render returns what would be programmed for p, part by part. Equal plans give equal text.
	Render(p *plan.Plan, s Settings) []Section
	// Diff says how what the kernel holds differs from what would be programmed for p: a
	// line that begins with "+" for what it lacks, with "-" for what it has besides. It
	// changes nothing.
	Diff(ctx context.Context, p *plan.Plan, s Settings) (string, error)
	// Explainers returns one for each data plane that has it.
	Explainers() []Explainer

	// Preview says what Remove would remove, a line each, and changes nothing. It and the next two are about what a driver has in
	// the kernel, whichever process put it there; without a routeTable, 0, routes and routing rules are left alone.
	Preview(ctx context.Context, routeTable int) ([]string, error)
	// Remove removes all of it. It goes on after errors and returns all of them.
	Remove(ctx context.Context, routeTable int) error
	// Retire is Remove for a host on which another driver serves by now, without routes and
	// routing rules. It leaves what connections still need: then it returns a Drainer. When
	// nothing of that is left, Remove removes the rest.
	Retire(ctx context.Context) (Drainer, error)
}

// Facts holds what Probe found.
type Facts struct {
	Missing      error             // what no mode can do without, each part a [*Missing]; nil if nothing
	Capabilities []plan.Capability // everything that was tried
	// Dropping are rules of others that drop packets of services, which the driver's rules
	// can't prevent and those of another driver may, a sentence each: mode auto prefers that.
	Dropping []string
	// WithoutNetmap: rules can't replace the addresses of one network by those of another.
	WithoutNetmap bool
}

// Settings holds what rules depend on besides the plan and the host.
type Settings struct {
	Marks            Marks
	TCPPort, UDPPort uint16 // of userspace's listeners
	PassiveHealth    bool   // rules tell of connections to endpoints that may have no answer
	RouteTable       int    // for packets to sockets that bear a client's address
	Log              *slog.Logger
	// Failed is told when the kernel, or a program, refused a transaction of rules; may
	// be nil.
	Failed func(service.Family)
}

// Section is one part of what would be programmed.
type Section struct {
	Name string // "sets", "iptables-ipv4"; a data plane's own has its name
	Text string
}

// Steering decides who gets a service's new connections: userspace while it is alive and the
// plan says so, else the data plane of the kernel that has rules for the service. Its
// memberships (of sets or maps) follow every plan at once; the rules that consult them are
// the same whatever services there are, and are written by the first [Plane.Sync]. Its
// methods return within milliseconds. Follow and Damage are called by one goroutine; the
// others at any time. A Steering may also be a [SetCounter].
type Steering interface {
	// Follow makes them what p wants, to which d leads from the plan that was followed
	// last. New ones are added before old ones are deleted, so that no service is in no
	// data plane at all. Where data planes are [plan.Abilities.Atomic], it isn't called while the
	// Plane works; if the kernel holds all of the last plan, it writes the rules of services in the same transaction,
	// and its Result has Holds: nothing is left for a Sync.
	Follow(ctx context.Context, p *plan.Plan, d plan.Delta) Result
	// Damage says how the kernel's memberships differ from what was followed; empty if
	// they don't. After damage, or an error, the next Follow reads them back and mends them.
	Damage() (string, error)

	// Local reports whether rules rewrite destinations to this address to reach userspace.
	Local(a netip.Addr) bool
	// Missing says which routes and routing rules aren't there, a phrase each.
	Missing() ([]string, error)

	Heartbeat
	Exceptions
}

// Heartbeat bounds for how long new connections go to userspace. The kernel keeps the time,
// so that a process that is gone, or hangs, loses none.
type Heartbeat interface {
	// Alive leads new connections to userspace from now on and for d.
	Alive(d time.Duration) error
	// Dead ends that at once.
	Dead() error
	// Starting drops, for d, the first packets of connections that would be refused because
	// nothing serves their service, so that clients try again.
	Starting(d time.Duration) error
	// Started ends that at once.
	Started() error
}

// Exceptions are for single endpoints and connections.
type Exceptions interface {
	// LetRefusals lets the resets by which a TCP endpoint refuses connections through to
	// the clients for d. Otherwise the kernel drops them, so that the client's next SYN is
	// answered by another endpoint. That would be vain where the endpoint refuses this one
	// client only, and where it gets connections though it is ejected, as no other is left:
	// its clients would send SYNs until they time out.
	LetRefusals(endpoint netip.AddrPort, d time.Duration) error
	// KeepConnections makes connections come to userspace for d also when conntrack has
	// forgotten them and their service is in the kernel by now, where their next packet
	// would begin a connection to an endpoint.
	KeepConnections(d time.Duration, connections []Redirected) error
}

// Redirected is a TCP connection that userspace carries: what its client sends.
type Redirected struct{ Client, Address netip.AddrPort }

// SetCounter is a Steering that counts the entries of kproxy's sets, by name.
type SetCounter interface {
	SetEntries() (map[string]int, error)
}

// Plane is the data planes of a driver. What each carries is decided in plans; it renders
// them, compares with what the kernel holds, and applies the difference. One goroutine calls
// its methods, but Check, which may be called at any time. A Plane may also be a [Drainer], a
// [Counter], an [AffinityKeeper], a [Warner], and a [Renderer] or a [Comparer], and have a method
// Close.
type Plane interface {
	// Adopt reads what an earlier process left in the kernel, and returns the service
	// ports of s that it was serving there.
	Adopt(ctx context.Context, s *service.Snapshot) (map[service.Key]bool, error)
	// Want takes p, to which d leads from the plan before, as what Sync is to bring
	// about. It reports whether that is anything but what the last Sync failed to bring
	// about.
	Want(p *plan.Plan, d plan.Delta) bool
	// Sync brings the kernel to what is wanted. The first one begins with routes and rules
	// that lead to userspace, and then calls steered: that takes a moment, the rules of all
	// services may take many seconds, or fail. What failed is tried again at the latest by a
	// Sync before which nothing else was wanted.
	Sync(ctx context.Context, steered func()) Result
	// Programmed returns the KernelHash of the rules that the kernel holds of what is
	// wanted, by service port; nothing while that isn't known.
	Programmed() map[service.Key]uint64
	// Check returns what others changed since the last Sync, a phrase each. The next Sync
	// reads everything back and mends it. Check may delete what nothing needs any more.
	Check(ctx context.Context) ([]string, error)
}

// Drainer is a Plane whose endpoints that aren't wanted any more keep the connections
// that they have.
type Drainer interface {
	// Drain removes what has drained, and returns how many endpoints still drain.
	Drain(ctx context.Context) (left int, err error)
}

// Severer is a Drainer that can end the connections of endpoints that drain.
type Severer interface {
	// Sever has the next Drain remove an endpoint that drains, whatever connections it has: their next packets find
	// that they have ended. It may be called at any time.
	Sever(p service.Protocol, endpoint netip.AddrPort)
}

// Counter is a Plane that counts what steering's rules see.
type Counter interface {
	Counts(ctx context.Context) (Counts, error)
}

// Warner is a Plane that finds what of others' may keep packets from services.
type Warner interface {
	// Warnings are a sentence each. It may be called at any time.
	Warnings() ([]string, error)
}

// Renderer is a Plane whose objects are a [Ruleset].
type Renderer interface {
	// Render renders every plan that is to be programmed; d leads there from the one
	// before, whose unchanged parts are in the result as they were.
	Render(p *plan.Plan, d plan.Delta) Ruleset
	// Fresh renders a plan of any origin, remembers nothing, and may be called by
	// several goroutines at once.
	Fresh(p *plan.Plan) Ruleset
}

// Result says what a Sync did, or a Follow.
type Result struct {
	Err    error
	Failed map[service.Key]error // service ports whose rules could not be written, with why
	// Tried: rules of services were written, or may have been. It is false where there
	// was nothing to do, and where it failed before.
	Tried bool
	// Steered: rules that lead to userspace were written before those of services.
	Steered bool
	Full    bool              // what is in the kernel had to be read before
	Applied Applied           // in all
	Holds   *Objects          // what the kernel holds now; nil where that isn't known
	Written [2]map[string]int // rules, by address family and table
}

// OK reports whether the kernel holds all that is wanted.
func (r *Result) OK() bool { return r.Err == nil && len(r.Failed) == 0 }

// Objects counts what the kernel holds, by address family.
type Objects struct {
	Rules           [2]map[string]int // by table
	Virtuals, Reals [2]int            // virtual and real servers
}

// Counts are packets that kproxy's rules have counted since they were written, of
// both address families.
type Counts struct {
	Invalid uint64 // of endpoints, dropped because conntrack takes them for invalid
	Refused uint64 // that began a connection to a service without a usable endpoint or a live kproxy, and were refused
	Steered uint64 // that began a connection and were sent to userspace
}

// Add adds what was counted between two readings. A counter that went back was
// written anew in between, and began at 0.
func (c *Counts) Add(was, is Counts) {
	add := func(sum *uint64, was, is uint64) {
		if is < was {
			was = 0
		}
		*sum += is - was
	}
	add(&c.Invalid, was.Invalid, is.Invalid)
	add(&c.Refused, was.Refused, is.Refused)
	add(&c.Steered, was.Steered, is.Steered)
}

// Client is a client that stays with an endpoint for the time that remains.
type Client struct {
	Address   netip.Addr
	Endpoint  netip.AddrPort
	Remaining time.Duration
}

// AffinityKeeper is a [Plane] that keeps clients with endpoints, and can hand them over when
// services move. Its methods are called by one goroutine, beside those of Plane.
type AffinityKeeper interface {
	// ReadAffinity returns the clients of services that leave the data plane. A client
	// may be there more than once.
	ReadAffinity(from []Moving) (map[service.Key][]Client, error)
	// SeedAffinity makes clients of services that come keep their endpoints, where the data plane can be told of them. It
	// passes over those of endpoints that take no connections.
	SeedAffinity(ctx context.Context, to []Moving, clients map[service.Key][]Client) error
}

// Moving is a service that moves, as it is in the data plane that it comes to or leaves.
type Moving struct {
	Service *plan.Service
	Policy  *plan.Policy
}

// Explainer explains a data plane that chooses endpoints in the kernel by something other
// than rules of netfilter. Its methods read the network namespace of the
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
