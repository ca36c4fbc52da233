package result

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// Ratio is what a target's subject reached against the best of the others: what
// can be compared with another run's, as the figures themselves can't.
type Ratio struct {
	Case    string            `json:"case"`
	Subject string            `json:"subject"`
	Against string            `json:"against"` // all of them, separated by commas
	Better  Better            `json:"better"`
	Got     statistics.Spread `json:"got"` // its spread is the noise
}

// Baseline is the ratios of an earlier run.
type Baseline struct {
	KProxy  string  `json:"kproxy"`
	Started string  `json:"started"`
	Kernel  string  `json:"kernel"`
	Ratios  []Ratio `json:"ratios"`
}

// Baseline returns the report's ratios.
func (r *Report) Baseline() Baseline {
	b := Baseline{KProxy: r.KProxy, Started: r.Started.UTC().Format("2006-01-02"), Kernel: r.Host.Kernel}
	for i := range r.Cases {
		c := &r.Cases[i]
		for _, t := range c.Targets {
			if t.Measured && len(t.Against) > 0 {
				b.Ratios = append(b.Ratios, Ratio{c.Name, t.Subject, strings.Join(t.Against, ","), c.Better, t.Got})
			}
		}
	}
	return b
}

// Regressions names every ratio that is worse than it was by more than noise:
// each median lies beyond the other's worst or best round.
func (r *Report) Regressions(old Baseline) []string {
	var out []string
	for _, now := range r.Baseline().Ratios {
		i := slices.IndexFunc(old.Ratios, func(o Ratio) bool {
			return o.Case == now.Case && o.Subject == now.Subject && o.Against == now.Against
		})
		if i < 0 || !now.worseThan(old.Ratios[i].Got) {
			continue
		}
		out = append(out, fmt.Sprintf("%s: %s against %s was %s× and is %s×, beyond the noise of both runs",
			now.Case, now.Subject, strings.ReplaceAll(now.Against, ",", " or "), old.Ratios[i].Got, now.Got))
	}
	return out
}

// Elsewhere warns that the baseline is of another kernel, and with it of another
// machine most of the time: then differences needn't be kproxy's. It is empty otherwise.
func (r *Report) Elsewhere(old Baseline) string {
	if old.Kernel == r.Host.Kernel {
		return ""
	}
	return fmt.Sprintf("The baseline was measured with kernel %s, this run with %s: what is worse than the baseline may be the machine's doing.", old.Kernel, r.Host.Kernel)
}

func (r Ratio) worseThan(old statistics.Spread) bool {
	if r.Better == Lower {
		return r.Got.Median > old.Max && old.Median < r.Got.Min
	}
	return r.Got.Median < old.Min && old.Median > r.Got.Max
}

// ReadBaseline reads a file that [Baseline.Write] wrote.
func ReadBaseline(name string) (b Baseline, err error) {
	text, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	if err != nil {
		return b, fmt.Errorf("read baseline: %w", err)
	}
	return b, nil
}

// Write writes the baseline as JSON, one ratio a line in a difference.
func (b Baseline) Write(name string) error { return writeJSON(name, b) }
