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
