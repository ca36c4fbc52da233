package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// path is a setting's. /proc/sys/net is that of the thread that opens it.
func path(name string) string { return filepath.Join("/proc/sys/net/netfilter", name) }

// EnableAccounting makes the kernel count packets and bytes of new flows, and
// tell when flows end (Documentation/networking/nf_conntrack-sysctl.rst), in
// the network namespace of the calling thread. It changes nothing that is on.
func EnableAccounting() error {
	// nf_conntrack_events is 2, the default since 5.19, for "when somebody listens".
	for _, name := range []string{"nf_conntrack_acct", "nf_conntrack_events"} {
		n, err := read(name)
		if err == nil && n == 0 {
			err = os.WriteFile(path(name), []byte("1"), 0)
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("the kernel's connection tracking isn't loaded (modprobe nf_conntrack): %w", err)
		}
		if err != nil {
			return fmt.Errorf("enable conntrack accounting: %w", err)
		}
	}
	return nil
}

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

func read(name string) (int, error) {
	b, err := os.ReadFile(path(name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
