package leftovers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/kernel"
)

// Found holds what there is of kube-proxy's in the network namespace of the calling
// thread. The zero value holds nothing.
type Found struct {
	tables   []table  // iptables
	nftables []nft    // its own tables
	link     bool     // kube-ipvs0
	servers  []server // of IPVS
	sets     []string

	// Kept are chains that stay because others' rules lead there, and virtual
	// servers that may be others', a sentence each.
	Kept []string
}

// Look finds out. Programs that this host doesn't have are passed over: nothing
// was left with them.
func Look(ctx context.Context, run kernel.Runner) (f Found, err error) {
	if f.tables, f.Kept, err = findChains(ctx, run); err != nil {
		return f, err
	}
	if f.nftables, err = findNFT(); err != nil {
		return f, err
	}
	if f.sets, err = findSets(ctx, run); err != nil {
		return f, err
	}
	var doubtful []string
	f.link, f.servers, doubtful, err = findIPVS(f.sets)
	f.Kept = append(f.Kept, doubtful...)
	return f, err
}

// Empty reports whether nothing was found.
func (f Found) Empty() bool {
	return len(f.tables)+len(f.nftables)+len(f.servers)+len(f.sets) == 0 && !f.link
}

// Serves reports whether these are rules of a kube-proxy that has written all of them: a cluster has one Service at least, its API's.
func (f Found) Serves() bool {
	return f.link || len(f.nftables) > 0 || slices.ContainsFunc(f.tables, func(t table) bool {
		return slices.ContainsFunc(t.chains, func(c string) bool { return strings.HasPrefix(c, "KUBE-SVC-") })
	})
}

// String says in one line what was found.
func (f Found) String() string {
	var out []string
	count := func(n int, one, many string) {
		if n == 1 {
			out = append(out, "1 "+one)
		} else if n > 1 {
			out = append(out, fmt.Sprintf("%d %s", n, many))
		}
	}
	chains, jumps, order := map[string]int{}, map[string]int{}, []string{}
	for _, t := range f.tables {
		if !slices.Contains(order, t.program) {
			order = append(order, t.program)
		}
		chains[t.program] += len(t.chains)
		jumps[t.program] += len(t.jumps)
	}
	for _, p := range order {
		if chains[p] > 0 {
			count(chains[p], "chain of "+p, "chains of "+p)
		} else { // to chains that stay
			count(jumps[p], "rule of "+p, "rules of "+p)
		}
	}
	for _, n := range f.nftables {
		out = append(out, "the nftables table "+n.String())
	}
	if f.link {
		out = append(out, "the link "+ipvsLink)
	}
	count(len(f.servers), "virtual server", "virtual servers")
	count(len(f.sets), "ipset", "ipsets")
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, ", ")
}

// Remove removes what was found, and goes on where something can't be.
func Remove(ctx context.Context, run kernel.Runner, f Found) error {
	var errs *multierror.Error
	for _, t := range f.tables {
		errs = multierror.Append(errs, removeChains(ctx, run, t))
	}
	left := removeIPVS(f.link, f.servers)
	errs = multierror.Append(errs, removeNFT(f.nftables), left)
	if ctx.Err() == nil && left == nil { // by the sets the next attempt knows the virtual servers
		errs = multierror.Append(errs, removeSets(ctx, run, f.sets)) // which rules referred to
	}
	return errs.ErrorOrNil()
}

// ErrRunning says that kube-proxy runs, which would put everything back.
var ErrRunning = errors.New("kube-proxy is running on this node")

// Running returns the numbers of kube-proxy's processes, as far as this process
// sees others: in a container it may see its own only. proc is normally /proc.
func Running(proc string) (pids []int) {
	names, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	if err != nil {
		return nil
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil || strings.TrimSpace(string(b)) != "kube-proxy" {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
