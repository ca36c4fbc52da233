package plan

import "time"

// NodeFigures are what the dashboard's page of the node shows beside the Status.
type NodeFigures struct {
	Kernel    string // release, as of uname -r
	Conntrack ConntrackUse
	Syncs     []SyncTime                // the last passes that took effect, oldest first
	Rules     map[string]map[string]int // iptables rules by family ("ipv4", "ipv6"), then table
}

// ConntrackUse is how much of the conntrack table is in use.
type ConntrackUse struct {
	Count int `json:"count"`
	Max   int `json:"max"` // 0 where the kernel doesn't tell
}

// SyncTime is how long one pass of the reconcile loop took.
type SyncTime struct {
	Time            time.Time `json:"time"` // of its end
	DurationSeconds float64   `json:"durationSeconds"`
}
