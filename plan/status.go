package plan

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Status holds what `kproxy status -o json` and /api/v1/status print. Lists are
// sorted by namespace, name, port, then address.
type Status struct {
	Version       string          `json:"version"`
	Mode          Mode            `json:"mode"`
	Node          string          `json:"node"`
	UptimeSeconds int64           `json:"uptimeSeconds"`
	Alive         bool            `json:"alive"`               // the heartbeat holds
	Exhausted     []Resource      `json:"exhausted,omitempty"` // what userspace lacks room of, now or in the last 10 s
	Ready         bool            `json:"ready"`               // new connections to every service are carried, and the fallback rules are written
	NotReady      string          `json:"notReady,omitempty"`  // why not
	Drain         *Drain          `json:"drain,omitempty"`     // by kproxy drain; nil if it isn't
	Warnings      []string        `json:"warnings,omitempty"`  // what of others' may keep packets from services
	PassiveHealth PassiveHealth   `json:"passiveHealth"`
	Sync          SyncStatus      `json:"sync"`
	Sources       []SourceStatus  `json:"sources"`
	Capabilities  []Capability    `json:"capabilities"`
	Services      []ServiceStatus `json:"services"`
	Others        []string        `json:"others,omitempty"` // what Shorten has left out
}

// Shorten puts service ports in trouble first, leaves n at most, and names the others and the nodes of their endpoints.
func (s *Status) Shorten(n int) {
	var all [2][]ServiceStatus
	for i := range s.Services {
		if s.Services[i].InTrouble() {
			all[0] = append(all[0], s.Services[i])
		} else {
			all[1] = append(all[1], s.Services[i])
		}
	}
	s.Services = slices.Concat(all[0], all[1])
	n = min(n, len(s.Services))
	nodes := map[string]bool{"": true}
	for i := range s.Services[n:] {
		left := &s.Services[n+i]
		s.Others = append(s.Others, left.Title())
		for k := range left.Endpoints {
			if name := left.Endpoints[k].Node; !nodes[name] {
				nodes[name] = true
				s.Others = append(s.Others, name)
			}
		}
	}
	s.Services = s.Services[:n]
}

// PassiveHealth reports what clients' own packets have shown.
type PassiveHealth struct {
	Enabled bool   `json:"enabled"`
	Reason  string `json:"reason,omitempty"` // why it isn't, or what it lacks
	Ejected int    `json:"ejected"`          // endpoints
	// Isolated: this node itself seems to be cut off; absent if it doesn't.
	Isolated *health.Isolation   `json:"isolated,omitempty"`
	Nodes    []health.SilentNode `json:"silentNodes,omitempty"`
}

// Drain is a kproxy that load balancers are told to leave out, and whose userspace gets no new connections that
// the kernel can take.
type Drain struct {
	Since time.Time `json:"since"`
	// Left is how many TCP connections userspace carries, without those that have begun since to service ports that
	// stay there.
	Left int `json:"left"`
	// Kept are the service ports that stay in userspace, as NAMESPACE/NAME:PORT: the kernel can't serve them.
	Kept []string `json:"kept,omitempty"`
}

// Health says in a word or two whether userspace serves new connections: "alive",
// "EXHAUSTED: descriptors" and the like, or "NOT SERVING".
func (s *Status) Health() string {
	if !s.Alive {
		return "NOT SERVING"
	}
	if len(s.Exhausted) == 0 {
		return "alive"
	}
	names := make([]string, len(s.Exhausted))
	for i, r := range s.Exhausted {
		names[i] = string(r)
	}
	return "EXHAUSTED: " + strings.Join(names, ", ")
}

// SyncStatus describes the last pass of the reconcile loop.
type SyncStatus struct {
	Generation      uint64    `json:"generation"` // counts passes that took effect
	LastSuccess     time.Time `json:"lastSuccess"`
	LastError       string    `json:"lastError"`
	DurationSeconds float64   `json:"durationSeconds"`
}

// SourceStatus describes one place services come from.
type SourceStatus struct {
	Name   string `json:"name"`
	Synced bool   `json:"synced"`
	Error  string `json:"error"` // empty, or every problem, a line each
	// Saved is as of when the source was saved, where that is served because it couldn't be
	// read since the start; else zero.
	Saved time.Time `json:"saved,omitzero"`
}

// ServiceStatus is one service port.
type ServiceStatus struct {
	Namespace          string           `json:"namespace"`
	Name               string           `json:"name"`
	Port               string           `json:"port"`
	Protocol           string           `json:"protocol"`
	Addresses          []netip.AddrPort `json:"addresses"`
	NodePort           uint16           `json:"nodePort"`
	Algorithm          string           `json:"algorithm"`
	AffinitySeconds    float64          `json:"affinitySeconds,omitempty"`       // how long a client that is silent stays with its endpoint; 0 for no affinity
	InternalPolicy     string           `json:"internalTrafficPolicy,omitempty"` // "Local"; empty for Cluster
	ExternalPolicy     string           `json:"externalTrafficPolicy,omitempty"`
	SourceRanges       []netip.Prefix   `json:"sourceRanges,omitempty"` // of clients of its load balancer addresses; empty admits all
	DataPlane          DataPlane        `json:"dataplane"`
	State              State            `json:"state"`
	Reason             string           `json:"reason"`
	Cause              Cause            `json:"cause"`                   // the reason in a word, one of Causes
	QualifiesInSeconds float64          `json:"qualifiesInSeconds"`      // 0 when it isn't known
	Kernel             DataPlane        `json:"beneath"`                 // the kernel data plane whose rules it has
	KernelReason       string           `json:"beneathReason,omitempty"` // why that one, in mode auto
	Scheduler          string           `json:"scheduler,omitempty"`     // of that kernel data plane, if it has some
	Degraded           string           `json:"degraded,omitempty"`
	Problems           []string         `json:"problems,omitempty"`
	Connections        Connections      `json:"connections"`
	Offloads           uint64           `json:"offloads"` // into the kernel, since kproxy's start
	Recalls            uint64           `json:"recalls"`  // back to userspace
	Endpoints          []EndpointStatus `json:"endpoints"`
}

// Title names the service port as commands take it: namespace/name[:port].
func (s *ServiceStatus) Title() string { return s.Key().String() }

// Key returns that of the service port.
func (s *ServiceStatus) Key() service.Key {
	protocol, _ := service.ParseProtocol(s.Protocol) // which it was made of
	return service.Key{Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: protocol}
}

// HasPort reports whether port is its name or number.
func (s *ServiceStatus) HasPort(port string) bool {
	number := func(a netip.AddrPort) bool { return strconv.Itoa(int(a.Port())) == port }
	return port == s.Port || slices.ContainsFunc(s.Addresses, number)
}

// PortName returns its port's name, or else number, and nothing where it has neither.
func (s *ServiceStatus) PortName() string {
	if s.Port == "" && len(s.Addresses) > 0 {
		return strconv.Itoa(int(s.Addresses[0].Port()))
	}
	return s.Port
}

// UsableEndpoints counts those that get new connections.
func (s *ServiceStatus) UsableEndpoints() (n int) {
	for i := range s.Endpoints {
		if s.Endpoints[i].Usable {
			n++
		}
	}
	return n
}

// InTrouble reports whether the service port has something that a user would ask about.
func (s *ServiceStatus) InTrouble() bool {
	ejected := func(e EndpointStatus) bool { return e.Ejected != nil }
	return len(s.Problems) > 0 || s.Degraded != "" || s.Connections.Failed > 0 || s.UsableEndpoints() == 0 || slices.ContainsFunc(s.Endpoints, ejected)
}

// Connections counts what a service carried in every data plane, in the same way.
// BytesIn flows from client to endpoint.
type Connections struct {
	Active   int64  `json:"active"`
	Total    uint64 `json:"total"`  // connections that an endpoint took, and sessions
	Failed   uint64 `json:"failed"` // connections that none took
	Retried  uint64 `json:"retried"`
	BytesIn  uint64 `json:"bytesIn"`
	BytesOut uint64 `json:"bytesOut"`
}

// ServiceRows are a plan's service ports for those who look at one after the other, and at most at what has changed.
type ServiceRows struct {
	Services    []*Service                 // in the order of their keys; one that has moved is another value
	Connections func(i int) Connections    // of one of Services: costs a fraction of a row, and is part of it
	Row         func(i int) *ServiceStatus // its status, good until the next; without what active checks have left to say
}

// Attempts are the connections and sessions that clients began, taken or not.
func (c *Connections) Attempts() uint64 { return c.Total + c.Failed }

// EndpointStatus is one endpoint of a service port.
type EndpointStatus struct {
	Address          netip.AddrPort `json:"address"`
	Node             string         `json:"node"`
	Ready            bool           `json:"ready"`
	Serving          bool           `json:"serving"`
	Terminating      bool           `json:"terminating"`
	Local            bool           `json:"local"`
	Weight           uint16         `json:"weight"`
	Health           string         `json:"health"`
	Since            time.Time      `json:"since"`
	LastError        string         `json:"lastError"`
	LastCheck        time.Time      `json:"lastCheck,omitzero"`         // when the last active check ended; absent where there was none
	LastCheckSeconds float64        `json:"lastCheckSeconds,omitempty"` // how long it took
	Usable           bool           `json:"usable"`
	// Ejected says why passive health gives it no new connections; absent if it may get some. Then Health is "down", and
	// LastError has it in a line.
	Ejected           *health.Ejection `json:"ejected,omitempty"`
	ActiveConnections int64            `json:"activeConnections"`
	TotalConnections  uint64           `json:"totalConnections"`
	Failures          uint64           `json:"failures"`
	BytesIn           uint64           `json:"bytesIn"`
	BytesOut          uint64           `json:"bytesOut"`
}

// ConnectionStatus is one row of `kproxy connections`.
type ConnectionStatus struct {
	Protocol   string         `json:"protocol"`
	Client     netip.AddrPort `json:"client"`
	Service    string         `json:"service"` // namespace/name[:port]
	Address    netip.AddrPort `json:"address"` // the service address the client connected to
	Endpoint   netip.AddrPort `json:"endpoint"`
	DataPlane  DataPlane      `json:"dataplane"`
	AgeSeconds float64        `json:"ageSeconds"` // 0 where the kernel doesn't tell
	BytesIn    uint64         `json:"bytesIn"`
	BytesOut   uint64         `json:"bytesOut"`
}

// Event is one line of /api/v1/events: a change a person would want to see.
type Event struct {
	Time    time.Time `json:"time"`
	Kind    string    `json:"kind"` // "dataplane", "health", "sync"
	Service string    `json:"service,omitempty"`
	Message string    `json:"message"`
	// Move says what a service's change of data plane is; see [Change.Move].
	Move Move `json:"move,omitempty"`
}

// Row returns the status of s as of now, without the counters, which the data
// planes have. Its endpoints are in the order of s.Endpoints.
func (s *Service) Row(now time.Time) ServiceStatus {
	row := ServiceStatus{Addresses: []netip.AddrPort{}, Endpoints: make([]EndpointStatus, 0, len(s.Endpoints))}
	s.Fill(&row, now)
	return row
}

// Fill makes row what Row returns, with the room of the lists in it.
func (s *Service) Fill(row *ServiceStatus, now time.Time) {
	proto, _ := s.Port.Protocol.MarshalText() // never fails
	*row = ServiceStatus{
		Namespace: s.Port.Namespace, Name: s.Port.Name, Port: s.Port.Port,
		Protocol: string(proto), Algorithm: string(s.Port.Algorithm),
		AffinitySeconds: s.Port.Affinity.Seconds(), SourceRanges: s.Port.SourceRanges,
		Addresses: row.Addresses[:0],
		DataPlane: s.DataPlane, State: s.State, Reason: s.Reason, Cause: s.Cause,
		QualifiesInSeconds: secondsUntil(s.QualifiesAt, now),
		Kernel:             s.Kernel, KernelReason: s.KernelReason, Scheduler: s.Scheduler,
		Degraded: s.Degraded, Problems: s.Problems,
		Endpoints: row.Endpoints[:0],
	}
	if s.Port.InternalLocal {
		row.InternalPolicy = "Local"
	}
	if s.Port.ExternalLocal {
		row.ExternalPolicy = "Local"
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Kind == NodePort {
			row.NodePort = f.Address.Port()
		} else {
			row.Addresses = append(row.Addresses, f.Address)
		}
	}
	slices.SortFunc(row.Addresses, netip.AddrPort.Compare)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		st := EndpointStatus{
			Address: e.Address, Node: e.Node,
			Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
			Local: e.Local, Weight: e.Weight, Usable: e.Usable,
			Health: e.Health, Since: e.Since, LastError: e.Error, Ejected: e.Ejected,
		}
		if e.Ejected != nil {
			st.Health, st.Since, st.LastError = downText, e.Ejected.Since, e.Ejected.Text(now)
		}
		row.Endpoints = append(row.Endpoints, st)
	}
}

func secondsUntil(at, now time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return max(at.Sub(now), 0).Seconds()
}
