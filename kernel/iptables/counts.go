package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Counts returns what the shared rules have counted; 0 for rules that aren't there.
// It runs a program for each chain and family. It is safe for concurrent use.
func (b *Backend) Counts(ctx context.Context) (kernel.Counts, error) {
	var c kernel.Counts
	for _, chain := range []struct {
		table, name, target string
		sum                 *uint64
	}{
		{"filter", steering.ChainInvalid, "DROP", &c.Invalid},
		{"filter", steering.ChainReject, "REJECT", &c.Refused},
		{"filter", steering.ChainUnserved, "REJECT", &c.Refused},
		{"filter", steering.ChainNoPort, "REJECT", &c.Refused},
		{"nat", steering.ChainRedirect, "DNAT", &c.Steered},
		{"nat", steering.ChainShort, "DNAT", &c.Steered},
	} {
		for _, f := range b.env.Families() {
			n, err := b.packets(f, chain.table, chain.name, chain.target)
			if err != nil {
				return kernel.Counts{}, fmt.Errorf("read counters of %s: %w", chain.name, err)
			}
			*chain.sum += n
		}
	}
	return c, nil
}

// packets adds up the packets of a chain's rules with a target.
func (b *Backend) packets(f service.Family, table, chain, target string) (sum uint64, err error) {
	rules, err := b.single(f)
	if err != nil {
		return 0, err
	}
	list, err := rules.ListWithCounters(table, chain)
	if err = steering.Classified(err); errors.Is(err, kernel.ErrNotFound) || errors.Is(err, kernel.ErrSyntax) { // the legacy variant's word for no such chain
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	for line := range kernel.SavedLines(strings.Join(list, "\n")) {
		words := strings.Fields(line) // -A KPROXY-INVALID -c 12 720 -j DROP
		at := slices.Index(words, "-c")
		if at < 0 || at+1 == len(words) || words[0] != "-A" || !strings.Contains(line, "-j "+target) {
			continue
		}
		n, err := strconv.ParseUint(words[at+1], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}
