package flows

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Flow is a connection that is tried, and what must become of it.
type Flow struct {
	Service *Service
	Kind    Kind
	Port    int // which of the service's
	From    From
	Family  service.Family
	Want    Outcome
	Source  Source // that endpoints see, if Want serves
	Left    bool   // the address isn't the service's: what becomes of it is the host's doing
	Row     *Row
	// Nowhere is the address of a flow that is to no service; Service is then one that there is.
	Nowhere netip.AddrPort
}

// In returns what becomes of the flow in a mode: SCTP can't be served in userspace, and
// IPVS doesn't choose endpoints by client.
func (f *Flow) In(mode plan.Mode) Outcome {
	switch {
	case f.Service.Special != SCTP || f.Want.Verdict != Serve:
	case mode == plan.ModeUserspace:
		return Outcome{Verdict: Refuse}
	case mode == plan.ModeIPVS && f.Kind != ClusterIP && f.Service.External == Local:
		return f.Service.Endpoints.Local
	}
	return f.Want
}

// String names the flow as a test does.
func (f *Flow) String() string {
	if f.Nowhere.IsValid() {
		return fmt.Sprintf("%s to %s, which no service has, by %s (nowhere, line %d)", f.From, f.Nowhere, f.Family, f.Row.Line)
	}
	kind := string(f.Kind)
	if f.Port > 0 {
		kind = fmt.Sprintf("port %d of %s", f.Port+1, kind)
	}
	return fmt.Sprintf("%s to %s of %s by %s (row %d)", f.From, kind, f.Service.Name, f.Family, f.Row.Line)
}

// Flows returns what is tried in configuration c. It is an error if rows leave out
// anything or speak of it twice.
func (m *Matrix) Flows(c Configuration) ([]Flow, error) {
	var out []Flow
	for i := range m.Services {
		s := &m.Services[i]
		if !s.In(c) {
			continue
		}
		for _, kind := range Kinds {
			r, err := m.find(c, s, kind)
			if err != nil {
				return nil, err
			}
			for _, from := range Froms {
				cell := r.Cells[from]
				if !cell.Exists || from == Localhost && (kind != NodePort || s.Special == SCTP) {
					continue
				}
				for _, family := range service.Families {
					for port := range s.Ports() {
						f := Flow{Service: s, Kind: kind, Port: port, From: from, Family: family, Want: cell.outcome(s), Source: cell.Source, Row: r}
						if from == Localhost && c.OwnNodePorts {
							f.Left, f.Want = true, Outcome{Verdict: Refuse}
						}
						out = append(out, f)
					}
				}
			}
		}
	}
	return out, nil
}

// ToNowhere returns the flows that are to no service, in every configuration.
func (m *Matrix) ToNowhere() (out []Flow) {
	for i := range m.Nowhere {
		n := &m.Nowhere[i]
		for _, from := range []From{Pod, Node, Outside} {
			for _, family := range service.Families {
				f := Flow{Service: &m.Services[0], Kind: ClusterIP, From: from, Family: family, Want: Outcome{Verdict: n.Want}, Row: &Row{Line: n.Line}}
				if n.To == otherPort {
					f.Nowhere = netip.AddrPortFrom(f.Service.Address(ClusterIP, family), ClusterPort(9))
				} else {
					f.Nowhere = netip.AddrPortFrom(netip.MustParseAddr([2]string{"10.96.200.200", "fd00:96::c8c8"}[family]), ClusterPort(0))
				}
				out = append(out, f)
			}
		}
	}
	return out
}

// outcome returns what the cell means for a connection to s, given its endpoints.
func (c Cell) outcome(s *Service) Outcome {
	switch {
	case c.Drop:
		return Outcome{Verdict: Drop}
	case c.Policy == Local:
		return s.Endpoints.Local
	}
	return s.Endpoints.Cluster
}

// find returns the one row for an address of s.
func (m *Matrix) find(c Configuration, s *Service, kind Kind) (*Row, error) {
	names, policy := []string{string(kind), external}, s.External
	switch {
	case kind == ClusterIP:
		names, policy = names[:1], s.Internal
	case kind == LoadBalancer && s.Admits != "everyone":
		names = []string{admits + s.Admits}
	}
	var found *Row
	for i := range m.Rows {
		r := &m.Rows[i]
		if !slices.Contains(names, r.To) || r.Policy != policy || !applies(r.configurations, c) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("flows, lines %d and %d: both speak of %s of %s in configuration %s", found.Line, r.Line, kind, s.Name, c.Name)
		}
		found = r
	}
	if found == nil {
		return nil, fmt.Errorf("flows: no row speaks of %s of %s in configuration %s", kind, s.Name, c.Name)
	}
	return found, nil
}

// Address returns where a service answers, except at node ports, which are on the node.
func (s *Service) Address(kind Kind, family service.Family) netip.Addr {
	networks := map[Kind][2]string{
		ClusterIP: {"10.96.1.0", "fd00:96::1:0"}, ExternalIP: {"192.0.2.0", "2001:db8:1::"}, LoadBalancer: {"198.51.100.0", "2001:db8:2::"},
	}
	a := netip.MustParseAddr(networks[kind][family])
	for range s.Number {
		a = a.Next()
	}
	return a
}

// ClusterPort is the number of a port at all addresses but the node's, TCP and UDP.
func ClusterPort(port int) uint16 { return 80 + uint16(port) }

// NodePort is the number of a port at the node's addresses, TCP and UDP.
func (s *Service) NodePort(port int) uint16 { return 31000 + 300*uint16(port) + uint16(s.Number) }
