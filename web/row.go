package web

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// Row is one service port as the dashboard's overview shows it. It is immutable.
type Row struct {
	Key       string           `json:"key"` // namespace/name[:port]
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Port      string           `json:"port"`
	Protocol  string           `json:"protocol"`
	Addresses []netip.AddrPort `json:"addresses"`
	NodePort  uint16           `json:"nodePort"`
	Algorithm string           `json:"algorithm"`
	DataPlane plan.DataPlane   `json:"dataplane"`
	State     plan.State       `json:"state"`
	Reason    string           `json:"reason"`
	Condition plan.Condition   `json:"condition"`
	// QualifiesAt is when the service may be offloaded at the earliest; absent
	// where it isn't known.
	QualifiesAt *time.Time       `json:"qualifiesAt,omitempty"`
	Problems    []string         `json:"problems"`
	Degraded    string           `json:"degraded"`
	Connections plan.Connections `json:"connections"`
	Rates       Rates            `json:"rates"`
	Endpoints   EndpointCount    `json:"endpoints"`
	Fault       string           `json:"fault"` // of the first endpoint that is down
	Dots        []Dot            `json:"dots"`  // of the first endpoints
	// Others are the addresses of the further endpoints, for the search.
	Others []netip.AddrPort `json:"others,omitzero"`
}

// Rates are per second, over the last interval.
type Rates struct {
	Connections float64 `json:"connections"`
	BytesIn     float64 `json:"bytesIn"`
	BytesOut    float64 `json:"bytesOut"`
	Failed      float64 `json:"failed"`
	Retried     float64 `json:"retried"`
}

// EndpointCount counts a service port's endpoints by health.
type EndpointCount struct {
	Total   int `json:"total"`
	Up      int `json:"up"`
	Down    int `json:"down"`
	Unknown int `json:"unknown"`
	Usable  int `json:"usable"`
}

// Dot is one endpoint in a Row.
type Dot struct {
	Address netip.AddrPort `json:"address"`
	Health  string         `json:"health"`
	Usable  bool           `json:"usable"`
}

// maxDots is how many endpoints a Row shows one by one.
const maxDots = 12

// qualifiesJitter is how far two readings of one point in time may be apart, as the
// status gives the seconds that are left.
const qualifiesJitter = 500 * time.Millisecond

// newRow returns the Row of s as of now, or was if that says the same.
func newRow(was *Row, s *plan.ServiceStatus, rates Rates, now time.Time) *Row {
	r := &Row{
		Key: s.Title(), Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol,
		Addresses: s.Addresses, NodePort: s.NodePort, Algorithm: s.Algorithm,
		DataPlane: s.DataPlane, State: s.State, Reason: s.Reason, QualifiesAt: qualifiesAt(was, s, now),
		Problems: listed(s.Problems), Degraded: s.Degraded, Connections: s.Connections, Rates: rates, Condition: s.Condition(rates.Failed > 0),
		Endpoints: EndpointCount{Total: len(s.Endpoints)}, Dots: make([]Dot, 0, min(len(s.Endpoints), maxDots)),
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		switch e.Health {
		case "up":
			r.Endpoints.Up++
		case "down":
			r.Endpoints.Down++
			why := e.LastError
			if e.Ejected != nil {
				why = e.Ejected.Why() // for how long would be another row each second
			}
			if r.Fault == "" && why != "" {
				r.Fault = e.Address.String() + " is down: " + why
			}
		default:
			r.Endpoints.Unknown++
		}
		if e.Usable {
			r.Endpoints.Usable++
		}
		if i < maxDots {
			r.Dots = append(r.Dots, Dot{Address: e.Address, Health: e.Health, Usable: e.Usable})
		} else {
			r.Others = append(r.Others, e.Address)
		}
	}
	if was != nil && was.same(r) {
		return was
	}
	return r
}

// qualifiesAt turns the seconds that are left into a point in time: the former one
// unless it has moved.
func qualifiesAt(was *Row, s *plan.ServiceStatus, now time.Time) *time.Time {
	if s.QualifiesInSeconds <= 0 {
		return nil
	}
	at := now.Add(time.Duration(s.QualifiesInSeconds * float64(time.Second))).Round(time.Millisecond).UTC()
	if was != nil && was.QualifiesAt != nil && at.Sub(*was.QualifiesAt).Abs() < qualifiesJitter {
		return was.QualifiesAt
	}
	return &at
}

// same reports whether r and o say the same about one service port.
func (r *Row) same(o *Row) bool {
	return r.DataPlane == o.DataPlane && r.State == o.State && r.Reason == o.Reason && r.Condition == o.Condition &&
		r.Connections == o.Connections && r.Rates == o.Rates && r.Endpoints == o.Endpoints &&
		r.QualifiesAt == o.QualifiesAt && r.Degraded == o.Degraded && r.Fault == o.Fault &&
		r.Protocol == o.Protocol && r.NodePort == o.NodePort && r.Algorithm == o.Algorithm &&
		slices.Equal(r.Dots, o.Dots) && slices.Equal(r.Others, o.Others) && slices.Equal(r.Addresses, o.Addresses) && slices.Equal(r.Problems, o.Problems)
}
