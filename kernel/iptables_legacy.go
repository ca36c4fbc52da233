package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// LegacyFilter is table filter of iptables' legacy variant, as the kernel holds it.
type LegacyFilter struct {
	// Rules are struct ipt_entry or ip6t_entry, one behind the other, with names of chains
	// as those of error targets (linux/netfilter_ipv4/ip_tables.h).
	Rules []byte
	// First and Policy are where a hook's first entry and that of its policy begin in Rules.
	First, Policy [5]int
}

// Options of sockets, and offsets (linux/netfilter_ipv4/ip_tables.h).
const (
	legacyGetInfo  = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	legacyGetRules = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES
	legacyRulesAt  = 40 // in struct ipt_get_entries
)

// LegacyTables returns the tables of the legacy variant that the kernel has; none where it can't be asked.
func LegacyTables(f service.Family) []string {
	names, _ := os.ReadFile("/proc/thread-self/net/" + [2]string{service.IPv4: "ip", service.IPv6: "ip6"}[f] + "_tables_names")
	return strings.Fields(string(names))
}

// ReadLegacyFilter reads that of the calling thread's network namespace, without a program; nil where there
// is none, as the question would make it. It needs CAP_NET_ADMIN. The error is [unix.EAGAIN] where the table has
// changed meanwhile.
func ReadLegacyFilter(f service.Family) (*LegacyFilter, error) {
	if !slices.Contains(LegacyTables(f), "filter") {
		return nil, nil
	}
	fd, err := unix.Socket(int(f.Number()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("read legacy rules of xtables: %w", err)
	}
	defer unix.Close(fd)
	info, err := LegacyTableInfo(fd, f, "filter")
	if err != nil {
		return nil, err
	}
	rules := make([]byte, legacyRulesAt+int(info.Size))
	copy(rules, "filter")
	binary.NativeEndian.PutUint32(rules[32:], info.Size)
	if err := legacyOption(fd, f, legacyGetRules, rules); err != nil {
		return nil, err
	}
	t := &LegacyFilter{Rules: rules[legacyRulesAt:]}
	for hook := range t.First {
		t.First[hook], t.Policy[hook] = int(info.HookEntry[hook]), int(info.Underflow[hook])
	}
	return t, nil
}

// LegacyInfo is struct ipt_getinfo, and ip6t_getinfo, of a table of the legacy variant.
type LegacyInfo struct {
	Name       [32]byte
	ValidHooks uint32
	HookEntry  [5]uint32 // where a hook's first entry begins
	Underflow  [5]uint32 // and that of its policy
	NumEntries uint32
	Size       uint32 // of all entries, in bytes
}

// LegacyTableInfo asks for it by a socket of the family. The kernel makes a table that isn't there.
func LegacyTableInfo(socket int, f service.Family, table string) (info LegacyInfo, err error) {
	b := make([]byte, binary.Size(info))
	copy(b, table)
	if err = legacyOption(socket, f, legacyGetInfo, b); err == nil {
		_, err = binary.Decode(b, binary.NativeEndian, &info)
	}
	return info, err
}

// legacyOption reads an option of a socket into b, which names the table.
func legacyOption(socket int, f service.Family, option uintptr, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), [2]uintptr{service.IPv4: unix.SOL_IP, service.IPv6: unix.SOL_IPV6}[f], option,
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return fmt.Errorf("read legacy rules of xtables: %w", errno)
	}
	return nil
}
