package plan

import (
	"time"

	"kproxy.dev/kproxy/service"
)

// Figures holds what kube-proxy's metrics and kproxy's own tell beside the Status. Arrays are per
// family, unless they say otherwise.
type Figures struct {
	Queued             time.Time // when a pass was last due; zero before the first
	Synced             time.Time // when one last took effect; zero before
	ServiceChanges     uint64    // of Services since start
	EndpointChanges    uint64    // of Services' endpoints since start
	ServicesPending    int       // of the changes, those that wait for a pass that succeeds
	EndpointsPending   int
	NoLocalInternal    [2]int            // service ports whose internal traffic policy finds no endpoint here
	NoLocalExternal    [2]int            // and their external one
	Rules              [2]map[string]int // iptables rules by table
	Written            [2]map[string]int // of these, those of the last change
	RestoreFailures    [2]uint64         // of iptables-restore
	InvalidDropped     uint64            // packets that conntrack can't place
	Refused            uint64            // packets that began a connection to a service without a usable endpoint or a live kproxy
	Steered            uint64            // packets that began a connection and were sent to userspace
	ConntrackDeletions [2]uint64         // stale entries

	Sets           map[string]int // entries of each ipset; those of session affinity are one, "KPROXY-AFF"
	VirtualServers [2]int         // of IPVS
	RealServers    [2]int
	Draining       int    // real servers that only carry what they have
	Writes         Writes // since start

	PassFailures uint64 // of the loop that decides and updates the redirect sets
	RuleFailures uint64 // of the loop that programs rules
	RuleRepairs  uint64 // after another process changed kproxy's rules
	SetRepairs   uint64 // or the redirect sets

	Offloads map[Cause]uint64 // of service ports into the kernel, see [Change.Move]
	Recalls  map[Cause]uint64
	CatchUps uint64 // times userspace bridged a change of the kernel's rules

	Ejections map[string]uint64 // of endpoints by passive health, by reason
	Resets    uint64            // connections to endpoints that had left, and whose hosts were silent

	Conntrack          Usage    // of this network namespace
	ConntrackOverflows uint64   // times that ends of flows came too fast to be counted
	Descriptors        [2]Usage // for forwarding in userspace: TCP, UDP
	DescriptorWaits    [2]int   // who waits for some

	Exhausted []Resource                  // what userspace lacks room of
	Shed      [2][len(ShedReasons)]uint64 // TCP, UDP: connections and sessions that had to make room
}

// Resource names something of which the forwarder in userspace has a bounded amount.
type Resource string

const (
	Descriptors Resource = "descriptors" // file descriptors, of TCP connections
	Sessions    Resource = "sessions"    // UDP sessions
	Memory      Resource = "memory"      // of TCP sockets
)

// ShedReasons are why a connection or session had to make room for others: a peer had reset
// it, its client or its service held more than its share, or it was silent longest where none did.
var ShedReasons = [...]string{"reset", "client_share", "service_share", "idle"}

// Resources are all of them.
var Resources = []Resource{Descriptors, Sessions, Memory}

// Writes count what was written into the kernel or deleted from it.
type Writes struct {
	Chains, Rules uint64 // rules in chains that were written
	Entries       uint64 // of sets
	Virtuals      uint64 // virtual and real servers and their addresses
}

// Usage counts what there is of something that is limited. Max is 0 where the limit
// isn't known.
type Usage struct {
	Count int `json:"count"`
	Max   int `json:"max"`
}

// NoLocal counts the service ports that have endpoints, but none where their
// traffic policies allow: connections to their cluster addresses, or from outside
// to their other ones, are dropped.
func (p *Plan) NoLocal() (internal, external [2]int) {
	for _, s := range p.services() {
		var in, out [2]bool
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Verdict == Drop {
				in[f.Family] = in[f.Family] || f.Kind == ClusterIP
				out[f.Family] = out[f.Family] || f.Kind != ClusterIP
			}
		}
		for _, f := range service.Families {
			if in[f] {
				internal[f]++
			}
			if out[f] {
				external[f]++
			}
		}
	}
	return internal, external
}

// NodeFigures holds what the dashboard's page of the node shows beside the Status.
type NodeFigures struct {
	Kernel    string                    `json:"kernel"` // release, as of uname -r
	Conntrack Usage                     `json:"conntrack"`
	Syncs     []SyncTime                `json:"-"`              // the last passes that took effect, oldest first
	Rules     map[string]map[string]int `json:"rules"`          // iptables rules by family ("ipv4", "ipv6"), then table
	Sets      int                       `json:"sets"`           // ipsets; those of session affinity are one
	Virtuals  int                       `json:"virtualServers"` // of IPVS
}

// SyncTime says how long one pass of the reconcile loop took.
type SyncTime struct {
	Time            time.Time `json:"time"` // of its end
	DurationSeconds float64   `json:"durationSeconds"`
}
