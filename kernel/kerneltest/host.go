package kerneltest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Host is a model of a host: iptables of both families, ipsets, virtual servers
// and dummy links, in memory. It refuses what the kernel refuses: jumps to
// chains that don't exist, sets that don't exist, deleting what is referred to,
// targets in the wrong table, a real server without its virtual server.
// It passes the same tests as the real thing and is safe for concurrent use.
type Host struct {
	mu         sync.Mutex
	tables     [2]map[string]table // by name
	sets       map[string]*modelSet
	virtuals   map[server]*modelVirtual
	links      map[string]*modelDummy
	node       []netip.Addr  // addresses on other links
	schedulers []string      // that the kernel has
	ahead      time.Duration // of the machine's clock
	cut        []string      // see [Host.Cut]
	early      []netip.Addr  // see [Host.Early]
	vacant     []string      // see [Host.Vacant]
}

// table holds the rules of each chain.
type table map[string][]string

var builtin = map[string][]string{
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
}

// NewHost returns a host without rules or sets.
func NewHost() *Host {
	h := &Host{
		sets: map[string]*modelSet{}, virtuals: map[server]*modelVirtual{}, links: map[string]*modelDummy{},
		schedulers: defaultSchedulers,
	}
	for f := range service.Families {
		h.tables[f] = map[string]table{}
		for name, chains := range builtin {
			h.tables[f][name] = table{}
			for _, c := range chains {
				h.tables[f][name][c] = nil
			}
		}
	}
	return h
}

// Advance lets time pass.
func (h *Host) Advance(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ahead += d
}

// Now is the host's time.
func (h *Host) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now()
}

func (h *Host) now() time.Time { return time.Now().Add(h.ahead) }

// Run implements [kernel.Runner] for the -save and -restore of iptables, under
// the names of every variant.
func (h *Host) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f := service.IPv4
	if strings.HasPrefix(program, "ip6") {
		f = service.IPv6
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case strings.HasSuffix(program, "-save"):
		return h.save(f), nil
	case strings.HasSuffix(program, "-restore"):
		if err := h.restore(f, stdin); err != nil {
			err.Program, err.Args = program, args
			return nil, err
		}
		return nil, nil
	case slices.Equal(args, []string{"--version"}):
		return []byte("iptables v1.8.9 (nf_tables)\n"), nil
	}
	return nil, &kernel.ExecError{Program: program, Args: args, Status: -1, Stderr: "not in PATH", Kind: kernel.ErrNoProgram}
}

func (h *Host) save(f service.Family) []byte {
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(h.tables[f])) {
		t := h.tables[f][name]
		fmt.Fprintf(&b, "*%s\n", name)
		chains := slices.Sorted(maps.Keys(t))
		for _, c := range chains {
			policy := "-"
			if slices.Contains(builtin[name], c) {
				policy = "ACCEPT"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", c, policy)
		}
		for _, c := range chains {
			for _, r := range t[c] {
				fmt.Fprintf(&b, "-A %s %s\n", c, r)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}

// restore carries out text; each table's part as a whole or not at all.
func (h *Host) restore(f service.Family, text []byte) *kernel.ExecError {
	name, scratch := "", table(nil)
	for i, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		var err error
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "*"):
			name = line[1:]
			if h.tables[f][name] == nil {
				err = fmt.Errorf("can't initialize table %q", name)
			}
			scratch = maps.Clone(h.tables[f][name])
		case scratch == nil:
			err = fmt.Errorf("no table specified")
		case line == "COMMIT":
			h.tables[f][name], scratch = scratch, nil
		default:
			err = h.change(f, name, scratch, line)
		}
		if err != nil {
			return &kernel.ExecError{Status: 2, Stderr: err.Error(), Line: i + 1, Kind: kernel.ErrSyntax}
		}
	}
	return nil
}

// change carries out one line on t.
func (h *Host) change(f service.Family, name string, t table, line string) error {
	word, rest, _ := strings.Cut(line, " ")
	chain, rule, _ := strings.Cut(rest, " ")
	if strings.HasPrefix(word, ":") {
		return declare(name, t, word[1:])
	}
	_, exists := t[chain]
	if !exists {
		return fmt.Errorf("%s: no chain %q", line, chain)
	}
	switch word {
	case "-A", "-I":
		at := 1
		if number, rest, _ := strings.Cut(rule, " "); word == "-I" {
			if n, err := strconv.Atoi(number); err == nil {
				at, rule = n, rest
			}
		}
		if at < 1 || at > len(t[chain])+1 {
			return fmt.Errorf("%s: index of insertion too big", line)
		}
		if err := h.valid(f, name, t, rule); err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		if word == "-A" {
			t[chain] = append(slices.Clone(t[chain]), rule)
		} else {
			t[chain] = slices.Insert(slices.Clone(t[chain]), at-1, rule)
		}
	case "-D":
		at := slices.Index(t[chain], rule)
		if at < 0 {
			return fmt.Errorf("%s: no such rule", line)
		}
		t[chain] = slices.Delete(slices.Clone(t[chain]), at, at+1)
	case "-F":
		t[chain] = nil
	case "-X":
		if len(t[chain]) > 0 || slices.Contains(builtin[name], chain) || refers(t, chain) {
			return fmt.Errorf("%s: chain is in use", line)
		}
		delete(t, chain)
	default:
		return fmt.Errorf("unknown command %q", line)
	}
	return nil
}

// declare makes a chain, or empties it.
func declare(name string, t table, chain string) error {
	switch {
	case len(chain) > kernel.MaxChainName:
		return fmt.Errorf("chain name %q is too long", chain)
	case !slices.Contains(builtin[name], chain):
		t[chain] = nil
	}
	return nil
}

// tableTargets are the targets that only one table takes.
var tableTargets = map[string]string{"DNAT": "nat", "MASQUERADE": "nat", "REJECT": "filter"}

func (h *Host) valid(f service.Family, name string, t table, rule string) error {
	words := strings.Fields(rule)
	for i, w := range words[:max(0, len(words)-1)] {
		arg := words[i+1]
		switch w {
		case "-j", "-g":
			only, target := tableTargets[arg]
			if target && only != name || arg == "DROP" && name == "nat" {
				return fmt.Errorf("target %s isn't for table %s", arg, name)
			}
			if _, chain := t[arg]; kernel.Own(arg) && !chain {
				return fmt.Errorf("no chain %q", arg)
			}
		case "--match-set", "--add-set":
			s, ok := h.sets[arg]
			if !ok {
				return fmt.Errorf("no set %q", arg)
			}
			if s.Type != kernel.BitmapPort && s.Family != f {
				return fmt.Errorf("set %q is of the other family", arg)
			}
		}
	}
	return nil
}

// refers reports whether a rule of t leads to chain.
func refers(t table, chain string) bool {
	for _, rules := range t {
		for _, r := range rules {
			if mentions(r, "-j", chain) || mentions(r, "-g", chain) {
				return true
			}
		}
	}
	return false
}

func mentions(rule, flag, arg string) bool {
	return strings.Contains(" "+rule+" ", " "+flag+" "+arg+" ")
}

// Rules opens the rules of a family, whatever the variant.
func (h *Host) Rules(_ kernel.Variant, f service.Family) (steering.SingleRules, error) {
	return hostRules{h, f}, nil
}

// hostRules models coreos/go-iptables.
type hostRules struct {
	host   *Host
	family service.Family
}

func (r hostRules) exists(table, chain string, rule []string) bool {
	r.host.mu.Lock()
	defer r.host.mu.Unlock()
	return slices.Contains(r.host.tables[r.family][table][chain], join(rule))
}

// InsertUnique implements [steering.SingleRules].
func (r hostRules) InsertUnique(table, chain string, position int, rule ...string) error {
	if r.exists(table, chain, rule) {
		return nil
	}
	return r.restore(table, fmt.Sprintf("-I %s %d %s", chain, position, join(rule)))
}

// AppendUnique implements [steering.SingleRules].
func (r hostRules) AppendUnique(table, chain string, rule ...string) error {
	if r.exists(table, chain, rule) {
		return nil
	}
	return r.restore(table, "-A "+chain+" "+join(rule))
}

// DeleteIfExists implements [steering.SingleRules].
func (r hostRules) DeleteIfExists(table, chain string, rule ...string) error {
	if !r.exists(table, chain, rule) {
		return nil
	}
	return r.restore(table, "-D "+chain+" "+join(rule))
}

// List implements [steering.SingleRules].
func (r hostRules) List(table, chain string) ([]string, error) {
	r.host.mu.Lock()
	defer r.host.mu.Unlock()
	out := []string{"-P " + chain + " ACCEPT"}
	for _, rule := range r.host.tables[r.family][table][chain] {
		out = append(out, "-A "+chain+" "+rule)
	}
	return out, nil
}

// ListWithCounters implements [steering.SingleRules]: a model carries no packets.
func (r hostRules) ListWithCounters(string, string) ([]string, error) { return nil, nil }

func (r hostRules) restore(table, line string) error {
	_, err := r.host.Run(context.Background(), []byte("*"+table+"\n"+line+"\nCOMMIT\n"), kernel.DefaultVariant().Program[r.family]+"-restore")
	return err
}

// join quotes words as iptables-save does.
func join(spec []string) string {
	out := slices.Clone(spec)
	for i, w := range out {
		if strings.ContainsAny(w, " :,./") && i > 0 && out[i-1] == "--comment" {
			out[i] = `"` + w + `"`
		}
	}
	return strings.Join(out, " ")
}
