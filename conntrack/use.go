package conntrack

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Use returns how many entries the conntrack table holds and how many it can,
// in the network namespace of the calling thread. A failure means that
// connection tracking isn't loaded.
func Use() (count, limit int, err error) {
	if count, err = readNumber("nf_conntrack_count"); err != nil {
		return 0, 0, err
	}
	limit, err = readNumber("nf_conntrack_max")
	return count, limit, err
}

func readNumber(name string) (int, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys/net/netfilter", name))
	if err != nil {
		return 0, fmt.Errorf("read conntrack's use: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("read conntrack's use: %s: %w", name, err)
	}
	return n, nil
}
