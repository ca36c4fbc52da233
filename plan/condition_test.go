package plan

import (
	"slices"
	"testing"
)

func TestCondition(t *testing.T) {
	up := EndpointStatus{Health: "up", Usable: true}
	unchecked := EndpointStatus{Health: "unknown", Usable: true}
	down := EndpointStatus{Health: "down"}
	servedDown := EndpointStatus{Health: "down", Usable: true}
	notReady := EndpointStatus{Health: "unknown"}
	for _, tt := range []struct {
		name    string
		s       ServiceStatus
		failing bool
		want    Condition
	}{
		{"all up", ServiceStatus{Endpoints: []EndpointStatus{up, up}}, false, Fine},
		{"unchecked", ServiceStatus{Endpoints: []EndpointStatus{unchecked}}, false, Fine},
		{"one isn't ready", ServiceStatus{Endpoints: []EndpointStatus{up, notReady}}, false, Fine},
		{"one down", ServiceStatus{Endpoints: []EndpointStatus{up, down}}, false, PartlyDown},
		{"one down, connections fail", ServiceStatus{Endpoints: []EndpointStatus{up, down}}, true, Failing},
		{"all down", ServiceStatus{Endpoints: []EndpointStatus{down, down}}, true, Unanswered},
		{"all down and served anyway", ServiceStatus{Endpoints: []EndpointStatus{servedDown, servedDown}, Cause: CausePanic}, false, Unanswered},
		{"none ready", ServiceStatus{Endpoints: []EndpointStatus{notReady}, State: StateRejecting, Cause: CauseNotReady}, false, Unanswered},
		{"scaled to zero", ServiceStatus{State: StateRejecting, Cause: CauseNoEndpoint}, false, Vacant},
		{"local to other nodes", ServiceStatus{State: StateRejecting, Cause: CauseNotLocal, Endpoints: []EndpointStatus{notReady}}, false, Vacant},
		{"another proxy's", ServiceStatus{State: StateExcluded}, false, Fine},
		{"recalled", ServiceStatus{State: StateRecalled, Endpoints: []EndpointStatus{up}}, false, Troubled},
		{"a problem", ServiceStatus{Problems: []string{"x"}, Endpoints: []EndpointStatus{up}}, false, Troubled},
	} {
		if got := tt.s.Condition(tt.failing); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestVerdict(t *testing.T) {
	for _, tt := range []struct {
		counts map[Condition]int
		want   string
	}{
		{nil, "no services"},
		{map[Condition]int{Fine: 1}, "1 service port is fine"},
		{map[Condition]int{Fine: 300}, "all 300 service ports are fine"},
		{map[Condition]int{Unanswered: 3, PartlyDown: 11, Fine: 286}, "3 service ports don't answer, 11 have an endpoint down, 286 are fine"},
		{map[Condition]int{PartlyDown: 1, Vacant: 2, Fine: 1}, "1 service port has an endpoint down, 2 have no endpoint here, 1 is fine"},
	} {
		if got := VerdictOf(Summarize(tt.counts)); got != tt.want {
			t.Errorf("%v: %q, want %q", tt.counts, got, tt.want)
		}
	}
	for _, c := range []Condition{Unanswered, Failing, PartlyDown, Troubled, Vacant, Fine} {
		if !slices.ContainsFunc(Conditions, func(o struct {
			Condition
			one, several string
		}) bool {
			return o.Condition == c && o.one != "" && o.several != ""
		}) {
			t.Errorf("nothing is said of %s", c)
		}
	}
}
