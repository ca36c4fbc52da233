package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Report is the status of all nodes: nodes by name, service ports by namespace, name, port and protocol.
type Report struct {
	Nodes    []NodeReport    `json:"nodes"`
	Services []ServiceReport `json:"services"`
}

// NodeReport says how one node's kproxy is, or why that isn't known.
type NodeReport struct {
	Node     string   `json:"node"`
	Pod      string   `json:"pod,omitempty"`
	State    State    `json:"state"`           // a State, or how an answering kproxy calls its health
	Error    string   `json:"error,omitempty"` // what lies behind the state
	Version  string   `json:"version,omitempty"`
	Mode     string   `json:"mode,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
	SilentTo int      `json:"silentTo,omitempty"` // how many of the kproxys that answer find its endpoints silent; their words are in Warnings
	Services int      `json:"services"`           // service ports
	Active   int64    `json:"activeConnections"`
}

// ServiceReport is a service port as the nodes that answered have it.
type ServiceReport struct {
	Namespace   string                 `json:"namespace"`
	Name        string                 `json:"name"`
	Port        string                 `json:"port"`
	Protocol    string                 `json:"protocol"`
	Addresses   []netip.AddrPort       `json:"addresses"` // as most nodes have them
	NodePort    uint16                 `json:"nodePort"`
	DataPlanes  map[plan.DataPlane]int `json:"dataplanes"` // how many nodes have it in which
	Endpoints   int                    `json:"endpoints"`  // as many as most nodes have
	Up          int                    `json:"up"`         // of these, those that no node's health check calls down
	Nodes       int                    `json:"nodes"`      // that have it
	Connections plan.Connections       `json:"connections"`
	Differences []Difference           `json:"differences"` // of nodes from most others; by node
}

// Title names the service port as commands take it.
func (s *ServiceReport) Title() string {
	row := plan.ServiceStatus{Namespace: s.Namespace, Name: s.Name, Port: s.Port}
	return row.Title()
}

// Difference is in what one node differs from most others.
type Difference struct {
	Node  string    `json:"node"`
	What  string    `json:"what"`
	Since time.Time `json:"since,omitzero"`   // zero where the node doesn't know
	Why   string    `json:"reason,omitempty"` // in the words of its kproxy
	Moved bool      `json:"dataplane"`        // it is about the data plane, which goes by each node's own connections
	title string    // of the service port
}

// Merge makes a report of what nodes answered.
func Merge(answers []Answer[plan.Status]) *Report {
	r := &Report{Nodes: []NodeReport{}, Services: []ServiceReport{}}
	rows := map[service.Key]map[string]*plan.ServiceStatus{} // and node
	var answered []string
	for i := range answers {
		a := &answers[i]
		n := NodeReport{Node: a.Node.Name, Pod: a.Node.Pod}
		if a.Trouble != nil {
			n.State, n.Error = a.Trouble.State, a.Trouble.Text
			r.Nodes = append(r.Nodes, n)
			continue
		}
		st := &a.Value
		answered = append(answered, n.Node)
		n.State, n.Version, n.Mode, n.Warnings, n.Services = State(st.Health()), st.Version, string(st.Mode), st.Warnings, len(st.Services)
		n.Error = errorOf(st)
		for j := range st.Services {
			s := &st.Services[j]
			n.Active += s.Connections.Active
			k := s.Key()
			if rows[k] == nil {
				rows[k] = map[string]*plan.ServiceStatus{}
			}
			rows[k][n.Node] = s
		}
		r.Nodes = append(r.Nodes, n)
	}
	r.silences(answers, len(answered))
	for _, k := range slices.SortedFunc(maps.Keys(rows), service.Key.Compare) {
		s := ServiceReport{Namespace: k.Namespace, Name: k.Name, Port: k.Port, Nodes: len(rows[k])}
		s.merge(rows[k], answered)
		r.Services = append(r.Services, s)
	}
	return r
}

// silences says of nodes what the kproxys of others find: a node that is dead says nothing of itself.
func (r *Report) silences(answers []Answer[plan.Status], answered int) {
	by := map[string]int{}
	for i := range answers {
		for _, n := range answers[i].Value.PassiveHealth.Nodes {
			by[n.Name]++
		}
	}
	for i := range r.Nodes {
		if n := &r.Nodes[i]; by[n.Node] > 0 {
			n.SilentTo = by[n.Node]
			n.Warnings = append([]string{silentTo(n.SilentTo, answered)}, n.Warnings...)
		}
	}
}

// silentTo says that n of so many kproxys find a node silent.
func silentTo(n, of int) string {
	return fmt.Sprintf("%d of %d kproxys eject its endpoints, which are silent to them", n, of)
}

// merge fills s from its rows by node.
func (s *ServiceReport) merge(rows map[string]*plan.ServiceStatus, nodes []string) {
	s.DataPlanes, s.Differences = map[plan.DataPlane]int{}, []Difference{}
	addresses, ports := map[string]int{}, map[uint16]int{}
	endpoints, down := map[netip.AddrPort]int{}, map[netip.AddrPort]int{}
	for _, row := range rows {
		s.Protocol = row.Protocol
		s.DataPlanes[row.DataPlane]++
		addresses[fmt.Sprint(row.Addresses)]++
		ports[row.NodePort]++
		addCounts(&s.Connections, &row.Connections)
		for i := range row.Endpoints {
			endpoints[row.Endpoints[i].Address]++
			if row.Endpoints[i].Health == "down" {
				down[row.Endpoints[i].Address]++
			}
		}
	}
	plane, listed := most(s.DataPlanes), most(addresses)
	s.NodePort = most(ports)
	for e, n := range endpoints {
		if 2*n > len(rows) {
			s.Endpoints++
			if down[e] == 0 {
				s.Up++
			}
		}
	}
	for _, node := range nodes {
		row := rows[node]
		differs := func(d Difference, format string, args ...any) {
			d.Node, d.What, d.title = node, fmt.Sprintf(format, args...), s.Title()
			s.Differences = append(s.Differences, d)
		}
		if row == nil {
			differs(Difference{}, "doesn't have it")
			continue
		}
		if row.DataPlane != plane {
			differs(Difference{Why: row.Reason, Moved: true}, "in %s", row.DataPlane)
		}
		if fmt.Sprint(row.Addresses) != listed {
			differs(Difference{}, "at %v", row.Addresses)
		} else if s.Addresses == nil {
			s.Addresses = row.Addresses
		}
		has := map[netip.AddrPort]bool{}
		for i := range row.Endpoints {
			e := &row.Endpoints[i]
			has[e.Address] = true
			switch {
			case 2*endpoints[e.Address] <= len(rows):
				differs(Difference{Since: e.Since}, "has endpoint %s besides", e.Address)
			case e.Health == "down" && 2*down[e.Address] <= endpoints[e.Address]:
				differs(Difference{Since: e.Since, Why: e.LastError}, "finds endpoint %s down", e.Address)
			case e.Health != "down" && 2*down[e.Address] > endpoints[e.Address]:
				differs(Difference{Since: e.Since}, "doesn't find endpoint %s down", e.Address)
			}
		}
		for _, e := range slices.SortedFunc(maps.Keys(endpoints), netip.AddrPort.Compare) {
			if !has[e] && 2*endpoints[e] > len(rows) {
				differs(Difference{}, "lacks endpoint %s", e)
			}
		}
	}
}

// most returns the value that is there most often, the first of several.
func most[K cmp.Ordered](counts map[K]int) (out K) {
	n := 0
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		if counts[k] > n {
			out, n = k, counts[k]
		}
	}
	return out
}

func addCounts(sum, c *plan.Connections) {
	sum.Active += c.Active
	sum.Total += c.Total
	sum.Failed += c.Failed
	sum.Retried += c.Retried
	sum.BytesIn += c.BytesIn
	sum.BytesOut += c.BytesOut
}

// Undated are the nodes that may know since when they differ, by their events.
func (r *Report) Undated() map[string]bool {
	nodes := map[string]bool{}
	r.undated(func(d *Difference) { nodes[d.Node] = true })
	return nodes
}

func (r *Report) undated(f func(*Difference)) {
	for i := range r.Services {
		for j := range r.Services[i].Differences {
			if d := &r.Services[i].Differences[j]; d.Since.IsZero() && (d.Moved || d.What == "doesn't have it") {
				f(d)
			}
		}
	}
}

// Date takes from nodes' events, newest first, since when they differ: since the last event about the service
// port's data plane, which it has also when it comes and goes.
func (r *Report) Date(events map[string][]plan.Event) {
	last := map[[2]string]time.Time{} // by node and service port
	for node, list := range events {
		for _, e := range list {
			if k := [2]string{node, e.Service}; e.Kind == "dataplane" && e.Time.After(last[k]) {
				last[k] = e.Time
			}
		}
	}
	r.undated(func(d *Difference) { d.Since = last[[2]string{d.Node, d.title}] })
}
