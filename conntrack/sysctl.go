package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// EnableAccounting makes the kernel count packets and bytes of new flows, and
// tell when flows end (Documentation/networking/nf_conntrack-sysctl.rst), in
// the network namespace of the calling thread. It changes nothing that is on.
func EnableAccounting() error {
	err := errors.Join(
		enable("nf_conntrack_acct"),
		enable("nf_conntrack_events"), // 2, the default since 5.19, is "when somebody listens"
	)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("enable conntrack accounting: the kernel's connection tracking isn't loaded (modprobe nf_conntrack): %w", err)
	}
	if err != nil {
		return fmt.Errorf("enable conntrack accounting: %w", err)
	}
	return nil
}

func enable(name string) error {
	// /proc/sys/net is that of the thread that opens it.
	path := filepath.Join("/proc/sys/net/netfilter", name)
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(b)) != "0" {
		return nil
	}
	return os.WriteFile(path, []byte("1"), 0)
}
