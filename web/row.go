package web

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// Row is one service port as the dashboard's overview shows it. A Row is never
// changed once it is made: whoever holds one may read it at leisure.
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
	// QualifiesAt is when the service may be offloaded at the earliest; absent
	// where it isn't known.
	QualifiesAt *time.Time       `json:"qualifiesAt,omitempty"`
	Problems    []string         `json:"problems"`
	Degraded    string           `json:"degraded"`
	Connections plan.Connections `json:"connections"`
	Rates       Rates            `json:"rates"`
	Endpoints   EndpointCount    `json:"endpoints"`
	Dots        []Dot            `json:"dots"` // of the first endpoints
	// Others are the addresses of the further endpoints, for the search. In what
	// changed, they are absent where they are as before.
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

// qualifiesJitter is how far two readings of one point in time may be apart,
// which is told as the seconds that are left.
const qualifiesJitter = 500 * time.Millisecond

// rowKey is the key of a service port as the API spells it.
func rowKey(s *plan.ServiceStatus) string {
	key := s.Namespace + "/" + s.Name
	if s.Port != "" {
		key += ":" + s.Port
	}
	return key
}

// newRow returns the Row of s as of now, or was if that says the same.
func newRow(was *Row, s *plan.ServiceStatus, rates Rates, now time.Time) *Row {
	r := Row{
		Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol,
		Addresses: s.Addresses, NodePort: s.NodePort, Algorithm: s.Algorithm,
		DataPlane: s.DataPlane, State: s.State, Reason: s.Reason,
		Problems: s.Problems, Degraded: s.Degraded, Connections: s.Connections, Rates: rates,
	}
	if r.Problems == nil {
		r.Problems = []string{}
	}
	if was != nil {
		r.Key = was.Key
	} else {
		r.Key = rowKey(s)
	}
	r.QualifiesAt = qualifiesAt(was, s, now)
	var dots [maxDots]Dot
	n := r.countEndpoints(s.Endpoints, &dots)
	if was != nil && slices.Equal(was.Dots, dots[:n]) {
		r.Dots = was.Dots
	} else {
		r.Dots = slices.Clone(dots[:n])
	}
	if r.Dots == nil {
		r.Dots = []Dot{}
	}
	if was != nil {
		r.Others = was.Others
	}
	r.Others = others(r.Others, s.Endpoints)
	if was != nil && was.same(&r) {
		return was
	}
	changed := r // only what is kept goes to the heap
	return &changed
}

// countEndpoints fills r.Endpoints and the first dots, and returns how many.
func (r *Row) countEndpoints(endpoints []plan.EndpointStatus, dots *[maxDots]Dot) int {
	for i := range endpoints {
		e := &endpoints[i]
		switch e.Health {
		case "up":
			r.Endpoints.Up++
		case "down":
			r.Endpoints.Down++
		default:
			r.Endpoints.Unknown++
		}
		if e.Usable {
			r.Endpoints.Usable++
		}
		if i < maxDots {
			dots[i] = Dot{Address: e.Address, Health: e.Health, Usable: e.Usable}
		}
	}
	r.Endpoints.Total = len(endpoints)
	return min(len(endpoints), maxDots)
}

// others returns the addresses of the endpoints that have no dot; was if it has
// the same ones.
func others(was []netip.AddrPort, endpoints []plan.EndpointStatus) []netip.AddrPort {
	if len(endpoints) <= maxDots {
		return nil
	}
	rest := endpoints[maxDots:]
	same := len(was) == len(rest)
	for i := 0; same && i < len(rest); i++ {
		same = was[i] == rest[i].Address
	}
	if same {
		return was
	}
	out := make([]netip.AddrPort, len(rest))
	for i := range rest {
		out[i] = rest[i].Address
	}
	return out
}

// since is what a stream that knows was is told of r. A service with hundreds of
// endpoints changes its rates every moment, but hardly ever all these addresses.
func (r *Row) since(was *Row) *Row {
	if was == nil || was.Others == nil && r.Others == nil {
		return r
	}
	told := *r
	switch {
	case r.Others == nil:
		told.Others = []netip.AddrPort{}
	case slices.Equal(was.Others, r.Others):
		told.Others = nil
	}
	return &told
}

// qualifiesAt turns the seconds that are left into a point in time, and stays
// with the one of before unless it has moved.
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
	return r.DataPlane == o.DataPlane && r.State == o.State && r.Reason == o.Reason &&
		r.Connections == o.Connections && r.Rates == o.Rates && r.Endpoints == o.Endpoints &&
		r.QualifiesAt == o.QualifiesAt && r.Degraded == o.Degraded &&
		r.Protocol == o.Protocol && r.NodePort == o.NodePort && r.Algorithm == o.Algorithm &&
		slices.Equal(r.Dots, o.Dots) && slices.Equal(r.Others, o.Others) && slices.Equal(r.Addresses, o.Addresses) && slices.Equal(r.Problems, o.Problems)
}
