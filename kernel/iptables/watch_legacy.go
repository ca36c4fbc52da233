package iptables

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// legacyWatch watches the legacy variant, which keeps no count of changes. But
// a table has a number of entries and a size: while both stay, no rule came or
// went. When they move, the rules are read back and compared, because they may
// be anybody's.
//
// Where kproxy itself changed rules, the number of entries says whether nobody
// else did meanwhile. As it says less than the rules, these are compared as well,
// but only when verifyAfter has passed, however often they change.
type legacyWatch struct {
	backend *Backend
	sockets [2]int
	infos   map[string]tableInfo // nil until known
	own     map[string]int       // entries that kproxy has in each table, with infos

	busy     bool // kproxy is changing rules
	unsure   bool // others may have changed something since the last check
	compared time.Time
	owed     bool // something has changed since
}

// verifyAfter bounds how long a change can go unnoticed that somebody made in the
// very moment in which kproxy made another one, and that left the number of
// entries what kproxy's led to.
const verifyAfter = time.Minute

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

func (w *legacyWatch) changing(kernel.Ops) {
	if w.busy {
		return
	}
	w.busy = true
	infos, err := w.read()
	w.unsure = err != nil || w.infos == nil || !sameInfos(w.infos, infos)
}

func (w *legacyWatch) committed(_ int, ok bool) { w.unsure = w.unsure || !ok }

func (w *legacyWatch) expect(want *kernel.Ruleset) {
	infos, err := w.read()
	own := entries(want)
	known := err == nil && !w.unsure && w.infos != nil
	w.busy, w.unsure = false, false
	for table, info := range infos {
		known = known && int(info.numEntries)-own[table] == int(w.infos[table].numEntries)-w.own[table]
	}
	if !known {
		w.infos = nil
		return
	}
	w.owed = w.owed || !sameInfos(w.infos, infos)
	w.infos, w.own = infos, own
}

// entries counts what of kproxy's is in each table: a chain has an entry with its
// name and one at its end besides its rules (iptcc_compile_chain, libiptc.c).
func entries(want *kernel.Ruleset) map[string]int {
	out := map[string]int{}
	for _, f := range service.Families {
		table, n := "", 0
		for i := range want.Chains[f] {
			c := &want.Chains[f][i]
			if c.Table != table {
				out[tableKey(f, table)] += n
				table, n = c.Table, 0
			}
			n += c.Len() + 2
		}
		out[tableKey(f, table)] += n
		for _, j := range want.Jumps[f] {
			out[tableKey(f, j.Table)]++
		}
	}
	return out
}

func tableKey(f service.Family, table string) string { return f.String() + " " + table }

func (w *legacyWatch) check(ctx context.Context, want *kernel.Ruleset) ([]string, error) {
	infos, err := w.read()
	if err != nil {
		return nil, err
	}
	if w.infos != nil && sameInfos(w.infos, infos) && !(w.owed && time.Since(w.compared) > verifyAfter) {
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
	w.infos, w.own = infos, entries(want)
	w.compared, w.owed = time.Now(), false
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
			out[tableKey(f, table)] = info
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
