package load

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// kernelConfig is the configuration of the running kernel, from the kernel
// itself or from where distributions put it.
func kernelConfig() ([]byte, error) {
	text, err := gunzip("/proc/config.gz")
	if err == nil {
		return text, nil
	}
	release, err2 := os.ReadFile("/proc/sys/kernel/osrelease")
	if err2 != nil {
		return nil, errors.Join(err, err2)
	}
	running := strings.TrimSpace(string(release))
	for _, name := range []string{"/boot/config-" + running, "/lib/modules/" + running + "/config"} {
		if text, err2 = os.ReadFile(name); err2 == nil {
			return text, nil
		}
	}
	return nil, fmt.Errorf("read the kernel's configuration: %w", errors.Join(err, err2))
}

func gunzip(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}
