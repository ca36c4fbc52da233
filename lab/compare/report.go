package compare

import (
	"time"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// Report is what a comparison found; `-o json` prints it.
type Report struct {
	Version     string        `json:"version"`
	Command     string        `json:"command"`
	Time        time.Time     `json:"time"`
	Seconds     float64       `json:"seconds"` // all of it took
	Host        Host          `json:"host"`
	LoadAfter   string        `json:"loadAfter"`
	Repeat      int           `json:"repeat"`
	Services    []int         `json:"services"`
	Sizes       Sizes         `json:"sizes"`
	Planes      []PlaneReport `json:"planes"`
	Rows        []Row         `json:"rows"`
	Programming []Programming `json:"programming"`
	Noise       Noise         `json:"noise"`
	Findings    []string      `json:"findings"` // what the figures say
	Warnings    []string      `json:"warnings"` // what makes them doubtful
}

// PlaneReport says whether this host has a plane.
type PlaneReport struct {
	Plane     Plane  `json:"plane"`
	Available bool   `json:"available"`
	Reason    string `json:"reason,omitempty"` // why it isn't
}

// Programming is how long kproxy took until all services were programmed.
type Programming struct {
	Plane    Plane   `json:"plane"`
	Services int     `json:"services"` // in all; those that were there already don't count
	Seconds  float64 `json:"seconds"`
}

// Row is one figure, for every plane that was measured.
type Row struct {
	Key      string `json:"key"`
	Title    string `json:"title"`
	Unit     string `json:"unit"`
	More     bool   `json:"moreIsBetter"`
	Services int    `json:"services,omitempty"` // where the figure depends on their number
	Cells    []Cell `json:"cells"`
}

// Cell is one figure of one plane.
type Cell struct {
	Plane             Plane     `json:"plane"`
	Runs              []float64 `json:"runs"` // a value for each round
	statistics.Spread           // of Runs
	// Ratio to the direct figure of the same round; nil for Direct itself.
	Ratio *statistics.Spread `json:"ratio,omitempty"`
	Parts []Part             `json:"parts,omitempty"` // what the median is made of, roughly: medians of their own
}

// Part is who used a part of the processors' time.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Noise is what else went on.
type Noise struct {
	// Others is the share of the machine's processors that neither load, server,
	// kproxy nor the kernel's softirq threads used while loads ran; Steal is what
	// the hypervisor gave to others. Between 0 and 1.
	Others statistics.Spread `json:"others"`
	Steal  statistics.Spread `json:"steal"`
	Failed int               `json:"failed"` // exchanges, of all loads
	Error  string            `json:"error,omitempty"`
}

// Row returns the row with a key, for a number of services, or nil.
func (r *Report) Row(key string, services int) *Row {
	for i := range r.Rows {
		if r.Rows[i].Key == key && r.Rows[i].Services == services {
			return &r.Rows[i]
		}
	}
	return nil
}

// Cell returns that of a plane, or nil.
func (r *Row) Cell(p Plane) *Cell {
	for i := range r.Cells {
		if r.Cells[i].Plane == p {
			return &r.Cells[i]
		}
	}
	return nil
}

// measured are the planes with figures.
func (r *Report) measured() []Plane {
	var out []Plane
	for _, p := range r.Planes {
		if p.Available {
			out = append(out, p.Plane)
		}
	}
	return out
}
