package iptables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

func TestWords(t *testing.T) {
	t.Parallel()
	tests := []struct {
		rule string
		want []string
	}{
		{"-j RETURN", []string{"-j", "RETURN"}},
		{`-m comment --comment "a \"b\" it\'s \\" -j X`, []string{"-m", "comment", "--comment", `a "b" it's \`, "-j", "X"}},
		{`--comment ""`, []string{"--comment", ""}},
		{"  a   b ", []string{"a", "b"}},
		{"", nil},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, kernel.Words(tt.rule)); diff != "" {
			t.Errorf("kernel.Words(%q) (-want +got):\n%s", tt.rule, diff)
		}
	}
}

func TestTarget(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]string{
		"-j A": "A", "-g A": "A", "-p tcp -j A": "A", "-p tcp -j DNAT --to-destination 10.0.0.1:80": "DNAT", "-p tcp": "", "": "",
		`-m comment --comment "not -j this" -j A`: "A",
	} {
		if got := target(rule); got != want {
			t.Errorf("target(%q) = %q, want %q", rule, got, want)
		}
	}
}

// FuzzComment: whatever a service is called, its comment comes back as one word.
func FuzzComment(f *testing.F) {
	for _, s := range []string{"web", "default/web:http", `"`, `\`, "it's", "", "a  b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.ContainsAny(s, "\n\x00") {
			return
		}
		if got := kernel.Words(kernel.Comment(s)); len(got) != 4 || got[3] != s {
			t.Errorf("Comment(%q) is read as %q", s, got)
		}
	})
}

// FuzzParseSave: what is rendered is read back, whatever else is around it.
func FuzzParseSave(f *testing.F) {
	f.Add("KPROXY-A", "-p tcp -j RETURN", "# comment\n*raw\n:OTHER - [0:0]\n-A OTHER -j RETURN\nCOMMIT\n")
	f.Add("KPROXY-10.96.0.0/13", `-m comment --comment "x" -j DROP`, "garbage\n*nat\n-A KPROXY-B -j X")
	f.Fuzz(func(t *testing.T, name, rule, around string) {
		if strings.Contains(around+rule, `"`) { // what is quoted may go on behind the line
			return
		}
		if strings.ContainsAny(name+rule, "\n\r ") && strings.ContainsAny(name, "\n\r ") || strings.ContainsAny(rule, "\n\r") || rule == "" || strings.Contains(around, kernel.Prefix) {
			return
		}
		name = kernel.Prefix + name
		want := []kernel.Chain{{Table: "nat", Name: name, Rules: []string{rule}}}
		restored := restoreText([][]kernel.Chain{want})
		text := around + "\n" + string(restored) + around
		got, _ := ParseSave([]byte(text))
		got = slices.DeleteFunc(got, func(c kernel.Chain) bool { return c.Name != name })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("ParseSave (-want +got):\n%s", diff)
		}
	})
}

// dispatch are the chains of both trees, grown from nothing.
func dispatch(leaves, ports []leaf) []kernel.Chain {
	_, chains := (&trees{}).change(nil, leaves, nil, ports)
	return chains
}

// routes follows the tree and returns the rules that a packet meets at leaves.
func routes(chains map[string][]string, chain string, addr netip.Addr, proto service.Protocol, port uint16, steps *int) (leaves []string) {
	for _, r := range chains[chain] {
		*steps++
		match := true
		w := kernel.Words(r)
		for i, word := range w[:len(w)-1] {
			switch arg := w[i+1]; word {
			case "-d":
				match = match && netip.MustParsePrefix(arg).Contains(addr)
			case "-p":
				match = match && arg == proto.String()
			case "--dport":
				var lo, hi uint16
				if n, _ := fmt.Sscanf(arg, "%d:%d", &lo, &hi); n < 2 {
					hi = lo
				}
				match = match && lo <= port && port <= hi
			}
		}
		switch to := target(r); {
		case !match:
		case strings.HasPrefix(to, "SVC"):
			leaves = append(leaves, to)
		default:
			leaves = append(leaves, routes(chains, to, addr, proto, port, steps)...)
		}
	}
	return leaves
}

// TestTreeLeadsToEveryLeaf: in trees of all shapes a packet finds its leaf and
// no other, in few steps, through chains of at most eight rules.
func TestTreeLeadsToEveryLeaf(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 4))
	v4 := func(mask uint32) func(int) (netip.Addr, uint16) {
		return func(int) (netip.Addr, uint16) {
			n := 10<<24 | rng.Uint32()&mask
			return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), 80
		}
	}
	shapes := map[string]struct {
		n    int
		make func(int) (netip.Addr, uint16)
	}{
		"few":   {8, v4(0xff)},
		"nine":  {9, v4(0xff)},
		"dense": {250, v4(0xff)},
		"a /12": {5000, v4(0xfffff)},
		"everywhere": {300, func(int) (netip.Addr, uint16) {
			return netip.AddrFrom4([4]byte{byte(rng.Uint32()), byte(rng.Uint32()), 0, 1}), 80
		}},
		"many ports each": {600, func(int) (netip.Addr, uint16) { a, _ := v4(0x7)(0); return a, uint16(rng.Uint32()) }},
		"adjacent ports":  {300, func(i int) (netip.Addr, uint16) { a, _ := v4(0)(0); return a, uint16(8000 + i) }},
		"node ports":      {2000, func(int) (netip.Addr, uint16) { return netip.Addr{}, uint16(30000 + rng.Uint32N(2768)) }},
		"all ports":       {3000, func(int) (netip.Addr, uint16) { return netip.Addr{}, uint16(rng.Uint32()) }},
		"IPv6": {2000, func(int) (netip.Addr, uint16) {
			return netip.AddrFrom16([16]byte{0xfd, 14: byte(rng.Uint32()), 15: byte(rng.Uint32())}), 443
		}},
	}
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			seen := map[leaf]bool{}
			var leaves, ports []leaf
			for i := range shape.n {
				l := leaf{proto: []service.Protocol{service.TCP, service.UDP, service.SCTP}[rng.IntN(3)]}
				l.addr, l.port = shape.make(i)
				if seen[l] {
					continue
				}
				seen[l] = true
				l.rule = toPort(l.addr, l.proto, l.port, "x") + fmt.Sprintf(" -j SVC%d", i)
				if l.addr.IsValid() {
					leaves = append(leaves, l)
				} else {
					ports = append(ports, l)
				}
			}
			checkTree(t, leaves, ports)
		})
	}
}

func checkTree(t *testing.T, leaves, ports []leaf) {
	t.Helper()
	chains := map[string][]string{}
	for _, c := range dispatch(leaves, ports) {
		if _, twice := chains[c.Name]; twice {
			t.Errorf("chain %s is there twice", c.Name)
		}
		if len(c.Rules) > fanout || len(c.Name) > kernel.MaxChainName {
			t.Errorf("chain %s has %d rules", c.Name, len(c.Rules))
		}
		chains[c.Name] = c.Rules
	}
	for root, list := range map[string][]leaf{chainDispatch: leaves, chainNodePorts: ports} {
		for _, l := range list {
			steps := 0
			if got := routes(chains, root, l.addr, l.proto, l.port, &steps); len(got) != 1 || got[0] != target(l.rule) {
				t.Fatalf("%v %s %d leads to %v, want %s", l.addr, l.proto, l.port, got, target(l.rule))
			}
			if steps > 64 {
				t.Errorf("%v %s %d takes %d rules", l.addr, l.proto, l.port, steps)
			}
		}
	}
}

// TestTreeIsLocal: a new address changes few chains, so little is restored.
func TestTreeIsLocal(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(5, 6))
	var leaves []leaf
	for i := range 5000 {
		n := rng.Uint32N(1 << 20)
		a := netip.AddrFrom4([4]byte{10, byte(96 + n>>16), byte(n >> 8), byte(n)})
		leaves = append(leaves, leaf{addr: a, proto: service.TCP, port: uint16(i), rule: toPort(a, service.TCP, uint16(i), "x") + " -j SVC"})
	}
	build := func(n int) kernel.Ruleset {
		chains := dispatch(slices.Clone(leaves[:n]), nil)
		slices.SortFunc(chains, kernel.CompareChains)
		return kernel.Ruleset{Chains: [2][]kernel.Chain{chains, nil}}
	}
	for n := 4990; n < 5000; n++ {
		ops := kernel.Diff(build(n), build(n+1))
		if changed := len(ops.Chains[0]) + len(ops.DelChains[0]); changed > 6 {
			t.Errorf("address %d changes %d chains", n, changed)
		}
	}
}
