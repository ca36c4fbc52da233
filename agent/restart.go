package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/userspace/handover"
)

// rememberFlows leaves the file.
func (a *Agent) rememberFlows() {
	raw, err := handover.Encode(a.userspace.Remember())
	if err == nil {
		err = node.ReplaceFile(filepath.Join(a.cfg.StateDir, node.FlowsFile), raw)
	}
	if err != nil {
		a.log.Warn("clients may have other endpoints after the next start", "error", err)
	}
}

// recallFlows has userspace go on with what the file says; first is the first plan. The file counts once.
func (a *Agent) recallFlows(first *plan.Plan) {
	path := filepath.Join(a.cfg.StateDir, node.FlowsFile)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var raw []byte
	if err == nil {
		raw, err = os.ReadFile(path)
	}
	var state handover.Userspace
	if err == nil {
		err = errors.Join(handover.Decode(raw, &state), os.Remove(path))
	}
	if err != nil {
		a.log.Warn("clients may have other endpoints than before the start", "file", path, "error", err)
		return
	}
	a.userspace.Prepare(first, plan.Between(nil, first))
	a.uncommitted = true
	a.userspace.Restore(&state, max(time.Since(info.ModTime()), 0))
}

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
