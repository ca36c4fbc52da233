package leftovers

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Running returns the numbers of kube-proxy's processes, as far as this process
// sees others: in a container it may see its own only. proc is normally /proc.
func Running(proc string) (pids []int) {
	names, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	if err != nil {
		return nil
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil || strings.TrimSpace(string(b)) != "kube-proxy" {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
