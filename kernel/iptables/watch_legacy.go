package iptables

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// tableSizes is the stamper of the legacy variant, which keeps no count of changes. But
// a table has a number of entries and a size: while both stay, no rule came or went.
// Where kproxy itself changed rules, the number of entries says whether others did
// meanwhile, if less than the rules would.
type tableSizes struct{ sockets [2]int }

// sizes are those of each of ownTables, by family.
type sizes [2][3]tableInfo

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

func newTableSizes(families []service.Family) (*tableSizes, error) {
	w := &tableSizes{sockets: [2]int{-1, -1}}
	for _, f := range families {
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

func (w *tableSizes) close() {
	for _, fd := range w.sockets {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func (w *tableSizes) stamp() (stamp, error) {
	var out sizes
	for f, fd := range w.sockets {
		if fd < 0 {
			continue
		}
		level := [2]uintptr{service.IPv4: unix.SOL_IP, service.IPv6: unix.SOL_IPV6}[f]
		for i, table := range ownTables {
			info := &out[f][i]
			copy(info.name[:], table)
			size := uint32(unsafe.Sizeof(*info))
			_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), level, soGetInfo,
				uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
			if errno != 0 {
				return nil, fmt.Errorf("read %s table %s: %w", service.Family(f), table, errno)
			}
		}
	}
	return out, nil
}

func (w *tableSizes) follows(old, now stamp, _ int, was, want *kernel.Ruleset) (follows, sure bool) {
	before, after := entries(was), entries(want)
	for f := range before {
		for i := range before[f] {
			if int(now.(sizes)[f][i].numEntries)-after[f][i] != int(old.(sizes)[f][i].numEntries)-before[f][i] {
				return false, false
			}
		}
	}
	return true, now == old
}

// entries counts what kproxy has in each of ownTables: a chain has an entry with its
// name and one at its end besides its rules (iptcc_compile_chain, libiptc.c).
func entries(want *kernel.Ruleset) (out [2][3]int) {
	for f := range service.Families {
		table, at := "", 0
		for i := range want.Chains[f] {
			c := &want.Chains[f][i]
			if c.Table != table {
				table, at = c.Table, slices.Index(ownTables, c.Table)
			}
			out[f][at] += c.Len() + 2
		}
		for _, j := range want.Jumps[f] {
			out[f][slices.Index(ownTables, j.Table)]++
		}
	}
	return out
}
