package agent

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// recorded is a recorder that remembers.
type recorded [][]string

func (r *recorded) Event(namespace, name string, warning bool, reason, action, note string) {
	kind := "normal"
	if warning {
		kind = "warning"
	}
	*r = append(*r, []string{namespace + "/" + name, kind, reason, action, note})
}

func TestRecordMoves(t *testing.T) {
	port := func(name, port string, d plan.DataPlane, reason string) *plan.Service {
		k := service.Key{Namespace: "default", Name: name, Port: port, Protocol: service.TCP}
		return &plan.Service{Port: &service.Port{Key: k}, DataPlane: d, Reason: reason}
	}
	offloaded := func(name string, d plan.DataPlane) *plan.Service {
		s := port(name, "", d, "kernel rules are being updated")
		s.State, s.Cause = plan.StateOffloaded, plan.CauseQualified
		if d == plan.Userspace {
			s.Cause = plan.CauseUpdating
		}
		return s
	}
	pinned := func(name string, d plan.DataPlane) *plan.Service {
		s := offloaded(name, d)
		s.State = plan.StatePinned
		return s
	}
	same := port("same", "", plan.Userspace, "qualifying")
	old := &plan.Plan{Services: []*plan.Service{
		port("a", "http", plan.Userspace, ""), port("a", "metrics", plan.Userspace, ""), port("b", "", plan.IPTables, ""),
		port("c", "", plan.Userspace, ""), port("d", "", plan.None, ""),
		offloaded("e", plan.IPTables), offloaded("f", plan.Userspace), offloaded("g", plan.IPTables), pinned("h", plan.IPTables), pinned("i", plan.Userspace), port("gone", "", plan.IPTables, ""), same,
	}}
	p := &plan.Plan{Services: []*plan.Service{
		port("a", "http", plan.IPTables, "steady"), port("a", "metrics", plan.IPTables, "steady too"), port("b", "", plan.Userspace, "its endpoints flap"),
		port("c", "", plan.None, "no usable endpoint"), port("d", "", plan.Userspace, "qualifying"),
		offloaded("e", plan.Userspace), offloaded("f", plan.IPTables), offloaded("g", plan.IPVS), pinned("h", plan.Userspace), pinned("i", plan.IPTables), port("new", "", plan.Userspace, "new"), same,
	}}
	var got recorded
	a := &Agent{record: &got}
	a.recordMoves(plan.Between(nil, old)) // a start is no move
	a.recordMoves(plan.Between(old, old))
	a.recordMoves(plan.Between(old, p))
	want := recorded{
		{"default/a", "normal", "DataPlaneChanged", "Offload", "http: userspace to iptables: steady; metrics: userspace to iptables: steady too"},
		{"default/b", "normal", "DataPlaneChanged", "Recall", "iptables to userspace: its endpoints flap"},
		{"default/c", "normal", "DataPlaneChanged", "Reject", "userspace to none: no usable endpoint"},
		{"default/d", "normal", "DataPlaneChanged", "Serve", "none to userspace: qualifying"},
		{"default/g", "normal", "DataPlaneChanged", "Offload", "iptables to ipvs: kernel rules are being updated"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	(&Agent{}).recordMoves(plan.Between(old, p)) // without a recorder of events
}

func TestNodeEligible(t *testing.T) {
	says := false
	for name, c := range map[string]struct {
		eligible func() bool
		running  bool
		want     bool
	}{
		"manifests":                 {nil, true, true},
		"the API says no":           {func() bool { return says }, true, false},
		"the source isn't open yet": {func() bool { return says }, false, true},
	} {
		a := &Agent{eligible: c.eligible}
		a.isSetUp.Store(c.running)
		if got := a.NodeEligible(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestRecordEjections: a Service has one event when endpoints are ejected and one when they are back, however many they are.
func TestRecordEjections(t *testing.T) {
	port := func(name string, ejected ...bool) *plan.Service {
		s := &plan.Service{Port: &service.Port{Key: service.Key{Namespace: "default", Name: name, Protocol: service.TCP}}}
		for i, is := range ejected {
			e := plan.Endpoint{Endpoint: &service.Endpoint{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(i + 1)}), 80)}, Probed: &plan.Probed{}}
			if is {
				e.Ejected = &health.Ejection{Since: time.Unix(1e9, 0), Reason: health.Silent, Evidence: "unanswered SYNs of 2 clients", Probes: 4}
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		return s
	}
	const why = ": ejected: silent to 4 probes after unanswered SYNs of 2 clients, 3s"
	was := &plan.Plan{Services: []*plan.Service{port("a", false, false), port("b", false, false, false), port("c", true, false), port("d", true), port("gone", true)}}
	is := &plan.Plan{Services: []*plan.Service{port("a", true, false), port("b", true, true, true), port("c", false, true), port("d", true)}}
	var got recorded
	a := &Agent{record: &got}
	a.recordEjections(plan.Between(was, is), time.Unix(1e9+3, 0))
	want := recorded{
		{"default/a", "warning", "EndpointEjected", "Eject", "10.2.0.1:80" + why},
		{"default/b", "warning", "EndpointEjected", "Eject", "10.2.0.1:80 and 2 more" + why},
		{"default/c", "warning", "EndpointEjected", "Eject", "10.2.0.2:80" + why},
		{"default/c", "normal", "EndpointBack", "Uneject", "10.2.0.1:80 gets connections again"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	(&Agent{}).recordEjections(plan.Between(was, is), time.Now()) // without a recorder of events
}
