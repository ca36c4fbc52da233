package agent

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestMoveCounts: moves are counted by cause and by service, what only bridges a
// change of rules is neither offload nor recall, and a service that is gone takes
// its own counts along, not the sums.
func TestMoveCounts(t *testing.T) {
	port := &service.Port{Key: web}
	at := func(d plan.DataPlane, s plan.State, c plan.Cause) *plan.Plan {
		return &plan.Plan{Services: []*plan.Service{{Port: port, DataPlane: d, State: s, Cause: c}}}
	}
	var m moveCounts
	var old *plan.Plan
	for _, p := range []*plan.Plan{
		at(plan.Userspace, plan.StateQualifying, plan.CauseUnsteady),
		at(plan.IPTables, plan.StateOffloaded, plan.CauseQualified),
		at(plan.Userspace, plan.StateOffloaded, plan.CauseUpdating),
		at(plan.IPTables, plan.StateOffloaded, plan.CauseQualified),
		at(plan.Userspace, plan.StateRecalled, plan.CauseFlapping),
		at(plan.IPVS, plan.StatePinned, plan.CausePinned),
		at(plan.Userspace, plan.StatePinned, plan.CauseUpdating), // the state hides that it was offloaded
		at(plan.IPVS, plan.StatePinned, plan.CausePinned),
		at(plan.None, plan.StateRejecting, plan.CauseNoEndpoint),
		at(plan.IPVS, plan.StatePinned, plan.CausePinned),
	} {
		m.count(plan.Between(old, p))
		old = p
	}
	check := func(what string, moves serviceMoves) {
		t.Helper()
		offloads, recalls, catchUps := m.byCause()
		if diff := cmp.Diff(map[plan.Cause]uint64{plan.CauseQualified: 1, plan.CausePinned: 1}, offloads); diff != "" {
			t.Errorf("%s: offloads (-want +got):\n%s", what, diff)
		}
		if diff := cmp.Diff(map[plan.Cause]uint64{plan.CauseFlapping: 1}, recalls); diff != "" {
			t.Errorf("%s: recalls (-want +got):\n%s", what, diff)
		}
		if catchUps != 2 {
			t.Errorf("%s: %d catch-ups, want 2", what, catchUps)
		}
		if got := m.of(web); got != moves {
			t.Errorf("%s: %+v, want %+v", what, got, moves)
		}
	}
	check("at the end", serviceMoves{offloads: 2, recalls: 1})
	m.count(plan.Between(old, &plan.Plan{}))
	check("service gone, whose plan may still be read", serviceMoves{offloads: 2, recalls: 1})
	m.count(plan.Delta{})
	check("after the next change", serviceMoves{})
}

// listed is a set store that only lists.
type listed func(func(string) bool) ([]kernel.SetState, error)

func (l listed) List(entries func(string) bool) ([]kernel.SetState, error) { return l(entries) }
func (listed) Create(kernel.Set) error                                     { return errors.ErrUnsupported }
func (listed) Destroy(string) error                                        { return errors.ErrUnsupported }
func (listed) Add(kernel.Set, uint32, ...string) error                     { return errors.ErrUnsupported }
func (listed) Delete(kernel.Set, ...string) error                          { return errors.ErrUnsupported }

func TestSetCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lists := 0
		var err error
		list := listed(func(entries func(string) bool) ([]kernel.SetState, error) {
			if lists++; entries != nil {
				t.Error("entries were asked for")
			}
			return []kernel.SetState{
				{Set: kernel.Set{Name: "KPROXY-AFF-A"}, Count: 2}, {Set: kernel.Set{Name: "KPROXY-AFF-B"}, Count: 3},
				{Set: kernel.Set{Name: "KPROXY-USER-4"}, Count: 7},
			}, err
		})
		a := &Agent{steering: &steering.Redirects{Store: list}, log: slog.New(slog.DiscardHandler)}
		want := map[string]int{"KPROXY-AFF": 5, "KPROXY-USER-4": 7}
		for range 2 {
			if got := a.countSets(); !cmp.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		time.Sleep(2 * setCountsAge)
		err = errors.New("no socket")
		if got := a.countSets(); !cmp.Equal(got, want) {
			t.Errorf("after an error: got %v, want what was counted last", got)
		}
		if lists != 2 {
			t.Errorf("sets were listed %d times, want 2", lists)
		}
	})
}
