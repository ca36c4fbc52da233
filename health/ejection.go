package health

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/service"
)

// Endpoint names an endpoint, whichever services have it.
type Endpoint struct {
	Protocol service.Protocol `json:"protocol"`
	Address  netip.AddrPort   `json:"address"`
}

// Why endpoints are ejected.
const (
	Silent  = "silent"  // nothing answered the probes
	Refused = "refused" // the endpoint refused the probes
)

// Ejection says why this node gives an endpoint no new connections, whatever its source says of it: clients met
// silence or a refusal there, and so did the probes that were sent for that reason ([kproxy.dev/kproxy/health/passive]).
// It isn't modified.
type Ejection struct {
	Since    time.Time `json:"since"`
	Reason   string    `json:"reason"`         // Silent or Refused
	Evidence string    `json:"evidence"`       // what made kproxy ask: "unanswered SYNs of 3 clients"
	Probes   int       `json:"probes"`         // unanswered or refused until it was ejected
	Node     string    `json:"node,omitempty"` // it runs on; empty if unknown
}

// Text says it in a line, with how long it has lasted.
func (e *Ejection) Text(now time.Time) string {
	return fmt.Sprintf("%s, %s", e.Why(), max(now.Sub(e.Since), 0).Round(time.Second))
}

// Why says what doesn't change while it lasts.
func (e *Ejection) Why() string {
	did := "silent to"
	if e.Reason == Refused {
		did = "refused"
	}
	return fmt.Sprintf("ejected: %s %s after %s", did, count(e.Probes, "probe"), e.Evidence)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// SilentNode is a node two endpoints of which, with different addresses, are ejected for silence.
type SilentNode struct {
	Name   string    `json:"name"`
	Since  time.Time `json:"since"`  // of the first of them
	Silent int       `json:"silent"` // endpoints that are ejected
	Asked  int       `json:"asked"`  // with those that have answered since
}

// Text says it in a line.
func (n *SilentNode) Text() string {
	return fmt.Sprintf("node %s: %d of %d endpoints silent", n.Name, n.Silent, n.Asked)
}

// Isolation says that this node itself seems to be cut off: hosts on most other nodes are silent at once, so none of their
// endpoints is ejected.
type Isolation struct {
	Since  time.Time `json:"since"`
	Silent int       `json:"silent"` // nodes
	Nodes  int       `json:"nodes"`  // asked
}

// Text says it in a line.
func (i *Isolation) Text() string {
	return fmt.Sprintf("this node seems to be cut off: hosts on %d of %d other nodes are silent; no endpoint there is ejected", i.Silent, i.Nodes)
}

// Ejections holds the endpoints ejected at one moment, silent nodes and this node's isolation. They are immutable and safe for concurrent use; nil
// knows nothing.
type Ejections struct {
	Nodes     []SilentNode // by name
	Isolated  *Isolation   // nil if this node isn't
	endpoints map[Endpoint]*Ejection
}

// NewEjections returns the Ejections of a map, which it takes over.
func NewEjections(endpoints map[Endpoint]*Ejection, nodes []SilentNode, isolated *Isolation) *Ejections {
	return &Ejections{Nodes: nodes, Isolated: isolated, endpoints: endpoints}
}

// Of returns why an endpoint is ejected; nil if it isn't.
func (e *Ejections) Of(at Endpoint) *Ejection {
	if e == nil {
		return nil
	}
	return e.endpoints[at]
}

// Text says of an ejected endpoint all that is known, its node's silence included.
func (e *Ejections) Text(x *Ejection, now time.Time) string {
	text := x.Text(now)
	if e != nil {
		for i := range e.Nodes {
			if n := &e.Nodes[i]; n.Name == x.Node && x.Reason == Silent {
				text += ", its " + n.Text()
			}
		}
	}
	return text
}

// Warnings are sentences about nodes, this one's isolation first.
func (e *Ejections) Warnings() (out []string) {
	if e == nil {
		return nil
	}
	if e.Isolated != nil {
		out = append(out, e.Isolated.Text())
	}
	for i := range e.Nodes {
		out = append(out, e.Nodes[i].Text()+" to this node")
	}
	return out
}

// Silences returns the silent nodes with what there is to say of each, and of this node's isolation; empty if there is none.
func (e *Ejections) Silences() (nodes map[string]string, isolated string) {
	nodes = map[string]string{}
	if e == nil {
		return nodes, ""
	}
	for i := range e.Nodes {
		nodes[e.Nodes[i].Name] = e.Nodes[i].Text()
	}
	if e.Isolated != nil {
		isolated = e.Isolated.Text()
	}
	return nodes, isolated
}

// Len returns how many endpoints are ejected.
func (e *Ejections) Len() int {
	if e == nil {
		return 0
	}
	return len(e.endpoints)
}

// All returns the endpoints that are ejected, in order.
func (e *Ejections) All() []Endpoint {
	if e == nil {
		return nil
	}
	return slices.SortedFunc(maps.Keys(e.endpoints), Endpoint.compare)
}

func (e Endpoint) compare(o Endpoint) int {
	return cmp.Or(e.Address.Compare(o.Address), cmp.Compare(e.Protocol, o.Protocol))
}
