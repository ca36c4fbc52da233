package report

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/prometheus/procfs"
)

// Host describes the machine on which it was measured.
type Host struct {
	Kernel    string    `json:"kernel"`
	CPUs      int       `json:"cpus"`
	CPUModel  string    `json:"cpuModel,omitempty"`
	MemoryGiB float64   `json:"memoryGiB"`
	Go        string    `json:"go"`
	Programs  []Program `json:"programs,omitempty"`
	// Steal is the share of the processors that the hypervisor took during a run,
	// Others what this machine did besides; between 0 and 1.
	Steal  Spread `json:"steal"`
	Others Spread `json:"others"`
}

// Program is one that was measured or used.
type Program struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// ReadHost reads about this machine.
func ReadHost() (Host, error) {
	h := Host{CPUs: runtime.NumCPU(), Go: runtime.Version()}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	proc, err2 := procfs.NewDefaultFS()
	memory, err3 := proc.Meminfo()
	if err := errors.Join(err, err2, err3); err != nil {
		return h, fmt.Errorf("read about the host: %w", err)
	}
	h.Kernel = strings.TrimSpace(string(release))
	if total := memory.MemTotalBytes; total != nil {
		h.MemoryGiB = float64(*total) / (1 << 30)
	}
	if cpus, err := proc.CPUInfo(); err == nil && len(cpus) > 0 {
		h.CPUModel = cpus[0].ModelName // some architectures have none
	}
	return h, nil
}

// about is one paragraph on when and where.
func (r *Report) about() string {
	h := &r.Host
	model := ""
	if h.CPUModel != "" {
		model = " (" + h.CPUModel + ")"
	}
	text := fmt.Sprintf("Measured by `%s` on %s in %s: kproxy %s, Linux %s, %s%s, %s GiB of memory, %s.",
		r.Command, r.Started.UTC().Format("2 January 2006, 15:04 UTC"), r.duration(),
		r.Version, h.Kernel, Count(h.CPUs, "processor"), model, Figure(h.MemoryGiB), h.Go)
	for _, p := range h.Programs {
		text += fmt.Sprintf(" %s: %s.", p.Name, p.Version)
	}
	return text + fmt.Sprintf(" During runs the hypervisor took %.0f%% of the processors (up to %.0f%%), other programs %.0f%% (up to %.0f%%).",
		100*h.Steal.Median, 100*h.Steal.Max, 100*h.Others.Median, 100*h.Others.Max)
}
