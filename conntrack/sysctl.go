package conntrack

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Use returns how many entries the conntrack table holds and how many it can,
// in the network namespace of the calling thread. A failure means that
// connection tracking isn't loaded.
func Use() (count, limit int, err error) {
	if count, err = read("nf_conntrack_count"); err == nil {
		limit, err = read("nf_conntrack_max")
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read conntrack's use: %w", err)
	}
	return count, limit, nil
}

// read reads a setting. /proc/sys/net is that of the thread that opens it.
func read(name string) (int, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
