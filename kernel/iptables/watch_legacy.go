package iptables

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// tableSizes is the stamper of the legacy variant, which keeps no count of changes. But
// a table has a number of entries and a size: while both stay, no rule came or went.
// Where kproxy itself changed rules, the number of entries says whether others did
// meanwhile, if less than the rules would.
type tableSizes struct{ sockets [2]int }

// sizes holds the sizes of each of ownTables, by family.
type sizes [2][3]kernel.LegacyInfo

func newTableSizes(families []service.Family) (*tableSizes, error) {
	w := &tableSizes{sockets: [2]int{-1, -1}}
	for _, f := range families {
		fd, err := unix.Socket(int(f.Number()), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
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
		for i, table := range ownTables {
			var err error
			if out[f][i], err = kernel.LegacyTableInfo(fd, service.Family(f), table); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

func (w *tableSizes) follows(old, now stamp, _ int, was, want *kernel.Ruleset) (follows, sure bool) {
	before, after := entries(was), entries(want)
	for f := range before {
		for i := range before[f] {
			if int(now.(sizes)[f][i].NumEntries)-after[f][i] != int(old.(sizes)[f][i].NumEntries)-before[f][i] {
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
