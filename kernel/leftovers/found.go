package leftovers

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/kernel"
)

// Found is what there is of kube-proxy's in the network namespace of the calling
// thread. The zero value is nothing.
type Found struct {
	tables   []table  // iptables
	nftables []nft    // its own tables
	link     bool     // kube-ipvs0
	servers  []server // of IPVS
	sets     []string

	// Kept are chains that stay because others' rules lead there, a sentence each.
	Kept []string
}

// Look finds out. Programs that this host doesn't have are passed over: nothing
// was left with them.
func Look(ctx context.Context, run kernel.Runner) (f Found, err error) {
	if f.tables, f.Kept, err = lookChains(ctx, run); err != nil {
		return f, err
	}
	if f.nftables, err = lookNFT(); err != nil {
		return f, err
	}
	if f.sets, err = lookSets(ctx, run); err != nil {
		return f, err
	}
	f.link, f.servers, err = lookIPVS(ctx, run, f.sets)
	return f, err
}

// Empty reports whether nothing was found.
func (f Found) Empty() bool {
	return len(f.tables)+len(f.nftables)+len(f.servers)+len(f.sets) == 0 && !f.link
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
	byVariant, order := map[string]int{}, []string{}
	for _, t := range f.tables {
		if byVariant[t.program] == 0 {
			order = append(order, t.program)
		}
		byVariant[t.program] += len(t.chains)
	}
	for _, p := range order {
		count(byVariant[p], "chain of "+p, "chains of "+p)
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
	errs = multierror.Append(errs, removeNFT(f.nftables), removeIPVS(f.link, f.servers))
	if ctx.Err() == nil {
		errs = multierror.Append(errs, removeSets(ctx, run, f.sets)) // which rules referred to
	}
	return errs.ErrorOrNil()
}

// ErrRunning says that kube-proxy runs, which would put everything back.
var ErrRunning = errors.New("kube-proxy is running on this node")
