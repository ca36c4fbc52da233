package agent

import "kproxy.dev/kproxy/plan"

// recover goes on with what userspace carried in a kproxy that crashed; first is the first plan.
func (a *Agent) recover(first *plan.Plan) {
	a.userspace.Prepare(first, plan.Between(nil, first))
	a.uncommitted = true
	if err := a.userspace.Recover(a.remains); err != nil {
		a.log.Error("connections of the kproxy that crashed are lost", "error", err)
	}
	a.log.Info("going on with what a kproxy left that crashed", "connections", len(a.userspace.Connections()), "reset", a.remains.Broken)
	a.remains = nil
}

// dropRemains closes what a kproxy left that crashed, where this one has taken over from another instead: that served
// since, so what goes on has come from it, and the other ends would wait for the rest without an end.
func (a *Agent) dropRemains() {
	if a.remains == nil {
		return
	}
	a.log.Warn("gave up what a kproxy left that crashed, for what another one has handed over", "reset", a.remains.Broken)
	a.remains.Close()
	a.remains = nil
}
