package health

import (
	"testing"
	"time"
)

// TestEjectionsInWords: an ejection is told with how long it lasts, and with its node's silence where that is why.
func TestEjectionsInWords(t *testing.T) {
	now := time.Unix(1e9, 0)
	nodes := NewEjections(nil, []SilentNode{{Name: "n3", Silent: 14, Asked: 14}}, &Isolation{Silent: 3, Nodes: 4})
	e := Ejection{Since: now.Add(-12 * time.Second), Reason: Silent, Evidence: "unanswered SYNs of 3 clients", Probes: 4, Node: "n3"}
	elsewhere, refused := e, e
	elsewhere.Node, refused.Reason, refused.Probes = "n2", Refused, 1
	const why = "ejected: silent to 4 probes after unanswered SYNs of 3 clients"
	for name, c := range map[string]struct{ got, want string }{
		"its node is silent":   {nodes.Text(&e, now), why + ", 12s, its node n3: 14 of 14 endpoints silent"},
		"its node isn't":       {nodes.Text(&elsewhere, now), why + ", 12s"},
		"it refuses":           {nodes.Text(&refused, now), "ejected: refused 1 probe after unanswered SYNs of 3 clients, 12s"},
		"nothing is known":     {(*Ejections)(nil).Text(&e, now), why + ", 12s"},
		"the clock went back":  {e.Text(now.Add(-time.Hour)), why + ", 0s"},
		"what doesn't change":  {e.Why(), why},
		"this node, cut off":   {nodes.Warnings()[0], "this node seems to be cut off: hosts on 3 of 4 other nodes are silent; no endpoint there is ejected"},
		"another, which isn't": {nodes.Warnings()[1], "node n3: 14 of 14 endpoints silent to this node"},
	} {
		if c.got != c.want {
			t.Errorf("%s: %q, want %q", name, c.got, c.want)
		}
	}
}
