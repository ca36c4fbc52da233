package plan

import "time"

// NodeFigures are what the dashboard's page of the node shows beside the Status.
type NodeFigures struct {
	Kernel    string // release, as of uname -r
	Conntrack Usage
	Syncs     []SyncTime                // the last passes that took effect, oldest first
	Rules     map[string]map[string]int // iptables rules by family ("ipv4", "ipv6"), then table
	Sets      int                       // ipsets; those of session affinity are one
	Virtuals  int                       // virtual servers of IPVS
}

// SyncTime is how long one pass of the reconcile loop took.
type SyncTime struct {
	Time            time.Time `json:"time"` // of its end
	DurationSeconds float64   `json:"durationSeconds"`
}
