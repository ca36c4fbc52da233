package agent

import (
	"fmt"
	"strings"

	"kproxy.dev/kproxy/plan"
)

// recordMoves writes an event about every Service that another data plane
// carries in p than in old. Not about what p starts with: after a start, that
// would be all of them, and nothing has happened to any. What came or went is
// no move either.
func (a *Agent) recordMoves(old, p *plan.Plan) {
	if a.record == nil || old == nil {
		return
	}
	for _, m := range moves(old, p) {
		a.record.Event(m.namespace, m.name, false, "DataPlaneChanged", m.action, strings.Join(m.notes, "; "))
	}
}

// move is what happened to the ports of one Service.
type move struct {
	namespace, name string
	action          string // of the first port, where they go different ways
	notes           []string
}

// moves returns the Services that are carried otherwise in p than in old, in
// key order, with one note for each of their ports.
func moves(old, p *plan.Plan) []move {
	var out []move
	plan.Changes(old, p, func(was, is *plan.Service) bool {
		if was == nil || is == nil || was.DataPlane == is.DataPlane || catchesUp(was, is) {
			return true
		}
		k := is.Port.Key
		if n := len(out); n == 0 || out[n-1].namespace != k.Namespace || out[n-1].name != k.Name {
			out = append(out, move{namespace: k.Namespace, name: k.Name, action: actionOf(was.DataPlane, is.DataPlane)})
		}
		note := fmt.Sprintf("%s to %s: %s", was.DataPlane, is.DataPlane, is.Reason)
		if k.Port != "" {
			note = k.Port + ": " + note
		}
		m := &out[len(out)-1]
		m.notes = append(m.notes, note)
		return true
	})
	return out
}

// catchesUp reports whether userspace only bridges the moment that the kernel's
// rules take to follow a change, or has just done so: every change of endpoints
// may take that way, and the service is one of the kernel's before and after.
func catchesUp(was, is *plan.Service) bool {
	return was.State == plan.StateOffloaded && is.State == plan.StateOffloaded &&
		(was.DataPlane == plan.Userspace || is.DataPlane == plan.Userspace)
}

// actionOf names what kproxy does when it moves a service port.
func actionOf(was, is plan.DataPlane) string {
	switch {
	case is == plan.None:
		return "Reject"
	case was == plan.None:
		return "Serve"
	case is == plan.Userspace:
		return "Recall"
	}
	return "Offload"
}
