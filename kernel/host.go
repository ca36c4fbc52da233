package kernel

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Release returns the release of the running kernel.
func Release() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("read the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}

// OlderThan reports whether a kernel's release is before a version; one that says nothing isn't.
func OlderThan(release string, major, minor int) bool {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 2 {
		return false
	}
	a, errA := strconv.Atoi(parts[0])
	b, errB := strconv.Atoi(strings.TrimRight(parts[1], "-+abcdefghijklmnopqrstuvwxyz"))
	return errA == nil && errB == nil && (a < major || a == major && b < minor)
}

// RawSockets reports whether this process may open them, as the programs of iptables do.
func RawSockets() bool {
	have, err := Capabilities()
	return err == nil && have&(1<<unix.CAP_NET_RAW) != 0
}

// Capabilities are the effective ones of the calling thread (capget(2)), a bit for each.
func Capabilities() (uint64, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("read capabilities: %w", err)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective), nil
}
