package leftovers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
)

// table holds what kube-proxy left in one table of one program's rules.
type table struct {
	program string // "iptables-nft"
	name    string // "nat"
	chains  []string
	jumps   []string // kube-proxy's rules in built-in chains, as iptables-save prints them
}

// programs returns the programs whose rules a kube-proxy may have written, and
// what each one's -save prints. A host that doesn't tell its variants apart has
// one.
func programs(ctx context.Context, run kernel.Runner) (out []string, saved map[string][]byte, err error) {
	saved = map[string][]byte{}
	nft, legacy := kernel.VariantNFT().Program, kernel.VariantLegacy().Program
	for _, group := range [][]string{slices.Concat(nft[:], legacy[:]), {"iptables", "ip6tables"}} {
		for _, p := range group {
			text, err := run.Run(ctx, nil, p+"-save")
			switch {
			case errors.Is(err, kernel.ErrNoProgram):
				continue
			case err != nil && strings.HasSuffix(p, "-legacy") && !errors.Is(err, kernel.ErrPermission) && ctx.Err() == nil:
				continue // the kernel has no such tables
			case err != nil:
				return nil, nil, fmt.Errorf("read rules: %w", err)
			}
			out, saved[p] = append(out, p), text
		}
		if len(out) > 0 {
			return out, saved, nil
		}
	}
	return nil, saved, nil
}

func findChains(ctx context.Context, run kernel.Runner) (found []table, kept []string, err error) {
	names, saved, err := programs(ctx, run)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range names {
		tables, stay := parse(p, saved[p])
		found, kept = append(found, tables...), append(kept, stay...)
	}
	return found, kept, nil
}

// parse picks kube-proxy's part out of what iptables-save printed.
func parse(program string, text []byte) (found []table, kept []string) {
	var t *parsed
	finish := func() {
		if t != nil {
			out, stay := t.own(program)
			if kept = append(kept, stay...); len(out.chains)+len(out.jumps) > 0 {
				found = append(found, out)
			}
		}
	}
	for s := range kernel.SavedLines(string(text)) {
		switch {
		case strings.HasPrefix(s, "*"):
			finish()
			t = &parsed{name: s[1:], builtin: map[string]bool{}}
		case t == nil:
		case strings.HasPrefix(s, ":"):
			words := strings.Fields(s[1:])
			t.chains = append(t.chains, words[0])
			t.builtin[words[0]] = len(words) > 1 && words[1] != "-"
		case strings.HasPrefix(s, "-A "):
			t.rules = append(t.rules, s[len("-A "):])
		}
	}
	finish()
	return found, kept
}

// parsed is one table.
type parsed struct {
	name    string
	chains  []string
	builtin map[string]bool
	rules   []string // "CHAIN specification"
}

// own returns what is to be removed, and why some of it isn't: a chain that
// others' rules lead to, as the plugin portmap's may to KUBE-MARK-MASQ,
// stays with all that it leads to. kube-proxy's own jumps go in any case.
func (t *parsed) own(program string) (out table, kept []string) {
	out = table{program: program, name: t.name}
	leads := map[string][]string{}
	var reached []string
	for _, r := range t.rules {
		from, to := ends(r)
		switch {
		case !ownChain(t.name, to):
		case ownChain(t.name, from):
			leads[from] = append(leads[from], to)
		case !t.builtin[from]:
			reached = append(reached, to)
			kept = append(kept, fmt.Sprintf("%s, table %s: %s stays, because the rules of %s lead there", program, t.name, to, from))
		case ownJump(t.name, r):
			out.jumps = append(out.jumps, r)
		default:
			reached = append(reached, to)
			kept = append(kept, fmt.Sprintf("%s, table %s: %s stays, because a rule that isn't kube-proxy's leads there: -A %s", program, t.name, to, r))
		}
	}
	stays := map[string]bool{}
	for len(reached) > 0 {
		c := reached[0]
		if reached = reached[1:]; !stays[c] {
			stays[c] = true
			reached = append(reached, leads[c]...)
		}
	}
	for _, c := range t.chains {
		if ownChain(t.name, c) && !stays[c] {
			out.chains = append(out.chains, c)
		}
	}
	slices.Sort(kept)
	return out, slices.Compact(kept)
}

// ends returns the chain that a rule is in and the one that it leads to.
func ends(rule string) (from, to string) {
	words := kernel.Words(rule)
	for i := 1; i+1 < len(words); i++ {
		if words[i] == "-j" || words[i] == "-g" {
			to = words[i+1]
		}
	}
	return words[0], to
}

// removeChains removes a table's part as a whole or not at all.
func removeChains(ctx context.Context, run kernel.Runner, t table) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%s\n", t.name)
	for _, c := range t.chains {
		fmt.Fprintf(&b, ":%s - [0:0]\n", c)
	}
	for _, j := range t.jumps {
		fmt.Fprintf(&b, "-D %s\n", j)
	}
	for _, c := range t.chains {
		fmt.Fprintf(&b, "-X %s\n", c)
	}
	b.WriteString("COMMIT\n")
	if _, err := run.Run(ctx, b.Bytes(), t.program+"-restore", "--noflush", "-w", "10"); err != nil {
		return fmt.Errorf("remove kube-proxy's chains in table %s: %w", t.name, err)
	}
	return nil
}
