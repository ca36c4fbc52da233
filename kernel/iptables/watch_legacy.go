package iptables

import (
	"context"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// legacyWatch watches the legacy variant, which keeps no count of changes. But
// a table has a number of entries and a size: while both stay, no rule came or
// went. When they move, the rules are read back and compared, because they may
// be anybody's.
type legacyWatch struct {
	backend *Backend
	sockets [2]int
	infos   map[string]tableInfo // nil until known
}

// tableInfo is struct ipt_getinfo, and ip6t_getinfo, of
// include/uapi/linux/netfilter_ipv4/ip_tables.h.
type tableInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	numEntries uint32
	size       uint32
}

// soGetInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO.
const soGetInfo = 64

func newLegacyWatch(b *Backend) (*legacyWatch, error) {
	w := &legacyWatch{backend: b, sockets: [2]int{-1, -1}}
	for _, f := range b.families() {
		domain := unix.AF_INET
		if f == service.IPv6 {
			domain = unix.AF_INET6
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			w.close()
			return nil, fmt.Errorf("open %s socket: %w", f, err)
		}
		w.sockets[f] = fd
	}
	return w, nil
}

func (w *legacyWatch) close() {
	for _, fd := range w.sockets {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func (w *legacyWatch) forget() { w.infos = nil }

func (w *legacyWatch) check(ctx context.Context, want *kernel.Ruleset) ([]string, error) {
	infos, err := w.read()
	if err != nil {
		return nil, err
	}
	if w.infos != nil && sameInfos(w.infos, infos) {
		return nil, nil
	}
	return w.compare(ctx, want)
}

// compare reads the rules back. What the tables' sizes were before is the norm
// if they are as wanted: a change in between shows at the next check.
func (w *legacyWatch) compare(ctx context.Context, want *kernel.Ruleset) ([]string, error) {
	infos, err := w.read()
	if err != nil {
		return nil, err
	}
	var have kernel.Ruleset
	for _, f := range w.backend.families() {
		if have.Chains[f], have.Jumps[f], err = w.backend.observeFamily(ctx, f); err != nil {
			return nil, err
		}
	}
	rules := *want
	rules.Sets = nil
	if damage := describe(kernel.Diff(have, rules)); len(damage) > 0 {
		return damage, nil
	}
	w.infos = infos
	return nil, nil
}

func (w *legacyWatch) read() (map[string]tableInfo, error) {
	out := map[string]tableInfo{}
	for _, f := range w.backend.families() {
		level := uintptr(unix.SOL_IP)
		if f == service.IPv6 {
			level = unix.SOL_IPV6
		}
		for _, table := range ownTables {
			var info tableInfo
			copy(info.name[:], table)
			size := uint32(unsafe.Sizeof(info))
			_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(w.sockets[f]), level, soGetInfo,
				uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
			if errno != 0 {
				return nil, fmt.Errorf("read %s table %s: %w", f, table, errno)
			}
			out[f.String()+" "+table] = info
		}
	}
	return out, nil
}

func sameInfos(a, b map[string]tableInfo) bool {
	for k, v := range b {
		if a[k] != v {
			return false
		}
	}
	return len(a) == len(b)
}
