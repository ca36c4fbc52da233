package compare

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"kproxy.dev/kproxy/lab/compare/load"
)

// Host is where it was measured.
type Host struct {
	Kernel          string  `json:"kernel"`
	CPUs            int     `json:"cpus"`
	CPUModel        string  `json:"cpuModel"`
	MemoryGiB       float64 `json:"memoryGiB"`
	IPTables        string  `json:"iptables"` // variant and version, as kproxy found it
	Go              string  `json:"go"`
	InterruptsApart bool    `json:"interruptsApart"` // see load.InterruptsApart
	InterruptsKnown bool    `json:"interruptsKnown"`
	LoadBefore      string  `json:"loadBefore"` // load averages of 1, 5 and 15 minutes
}

// ReadHost reads about this machine; IPTables stays empty.
func ReadHost() (Host, error) {
	h := Host{CPUs: runtime.NumCPU(), Go: runtime.Version(), LoadBefore: loadAverage()}
	h.InterruptsApart, h.InterruptsKnown = load.InterruptsApart()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	cpu, err2 := os.ReadFile("/proc/cpuinfo")
	memory, err3 := os.ReadFile("/proc/meminfo")
	if err := errors.Join(err, err2, err3); err != nil {
		return h, fmt.Errorf("read about the host: %w", err)
	}
	h.Kernel = strings.TrimSpace(string(release))
	h.CPUModel = value(string(cpu), "model name")
	var kib float64
	if _, err := fmt.Sscanf(value(string(memory), "MemTotal"), "%f kB", &kib); err != nil {
		return h, fmt.Errorf("read about the host: MemTotal: %w", err)
	}
	h.MemoryGiB = kib / (1 << 20)
	return h, nil
}

// value is that of the first line "key : value"; empty without one, as
// "model name" is missing on some architectures.
func value(text, key string) string {
	for line := range strings.Lines(text) {
		k, v, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}
