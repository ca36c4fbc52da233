package netfilter

import (
	"fmt"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// ruleset is the chains of one source, by table.
type ruleset struct {
	source string
	family service.Family
	chains map[string]*chain // "table chain"
	sets   map[string][]any  // elements of those of nftables
}

// chain is a chain with its rules.
type chain struct {
	table, name string
	policy      Verdict // empty for one that isn't built in
	counter     Counter
	rules       []*rule
}

// rule is a rule of either kind. Its parts must all hold, in order.
type rule struct {
	text    string
	counter Counter
	// spec is iptables' text of the parts and the target as long as nobody has asked
	// for them: of many thousand rules a packet meets a few.
	spec  string
	parts []part
	// to is what happens then; several of nftables, of which the last may end it.
	to []target
}

func (r *ruleset) chain(table, name string) *chain { return r.chains[table+" "+name] }

// builtin are the chains of tables that packets come to by themselves.
var builtin = map[string]bool{"PREROUTING": true, "INPUT": true, "FORWARD": true, "OUTPUT": true, "POSTROUTING": true}

// parseSave reads what iptables-save -c printed. What iptables can't print, because
// nft put it there, it leaves out or, base chains, shows as ones of its own that
// are empty: they are told apart by their names, see [Tables.readNFT].
func parseSave(source string, f service.Family, text string) (*ruleset, error) {
	r := &ruleset{source: source, family: f, chains: map[string]*chain{}}
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case line == "" || line[0] == '#':
		case line == "COMMIT":
			table = ""
		case line[0] == '*':
			table = strings.TrimSpace(line[1:])
		case table == "":
			return nil, fmt.Errorf("parse rules: %q is in no table", line)
		case line[0] == ':':
			r.addChain(table, line[1:])
		default:
			if err := r.addRule(table, line); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// addChain reads "INPUT ACCEPT [12:720]".
func (r *ruleset) addChain(table, line string) {
	words := strings.Fields(line)
	if len(words) < 2 {
		return
	}
	c := &chain{table: table, name: words[0]}
	switch words[1] {
	case "ACCEPT":
		c.policy = Accept
	case "DROP":
		c.policy = Drop
	}
	if len(words) > 2 {
		c.counter, _ = parseCounter(words[2])
	}
	r.chains[table+" "+c.name] = c
}

// addRule reads "[12:720] -A INPUT …".
func (r *ruleset) addRule(table, line string) error {
	var counter Counter
	if line[0] == '[' {
		brackets, rest, _ := strings.Cut(line, " ")
		var ok bool
		if counter, ok = parseCounter(brackets); !ok {
			return fmt.Errorf("parse rule %q: no counter", line)
		}
		line = rest
	}
	rest, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return fmt.Errorf("parse rule %q: it doesn't begin with -A", line)
	}
	name, spec, _ := strings.Cut(rest, " ")
	c := r.chain(table, name)
	if c == nil {
		return fmt.Errorf("parse rule %q: table %s has no such chain", line, table)
	}
	c.rules = append(c.rules, &rule{text: line, counter: counter, spec: spec})
	return nil
}

func parseCounter(s string) (Counter, bool) {
	packets, bytes, ok := strings.Cut(strings.Trim(s, "[]"), ":")
	p, err := strconv.ParseUint(packets, 10, 64)
	b, err2 := strconv.ParseUint(bytes, 10, 64)
	if !ok || err != nil || err2 != nil {
		return Counter{}, false
	}
	return Counter{&p, &b}, true
}

// part is one thing that a rule asks about a packet: it holds, or how likely it
// is to, and why.
type part interface {
	holds(w *walker, p *Packet) held
}

// module is a match of iptables with its options, or a rule's own options (-s,
// -d, …), whose name is empty.
type module struct {
	name    string
	options []option
}

// option is one with its arguments: "! --dport 80".
type option struct {
	name string
	not  bool
	args []string
}

func (o option) arg(i int) string {
	if i < len(o.args) {
		return o.args[i]
	}
	return ""
}

func find(options []option, name string) (option, bool) {
	for _, o := range options {
		if o.name == name {
			return o, true
		}
	}
	return option{}, false
}

// prepare takes a rule apart, once. What doesn't fit is kept where it is, and
// makes its match undecided.
func (r *rule) prepare() {
	if r.spec == "" {
		return
	}
	own := &module{}
	r.parts = []part{own}
	var to *xtables
	options := &own.options // of the match or target that options belong to
	last := options         // where the last option is
	not := false
	words := kernel.Words(r.spec)
	r.spec = ""
	for i := 0; i < len(words); i++ {
		w := words[i]
		argument := func() string {
			if i++; i < len(words) {
				return words[i]
			}
			return ""
		}
		switch {
		case w == "!":
			not = true
			continue
		case w == "-m" && to == nil:
			match := &module{name: argument()}
			r.parts = append(r.parts, match)
			options, last = &match.options, &match.options
		case (w == "-j" || w == "-g") && to == nil:
			to = &xtables{leave: w == "-g", name: argument()}
			r.to = append(r.to, to)
			options, last = &to.options, &to.options
		case strings.HasPrefix(w, "-") && len(w) > 1 && !number(w):
			if last = options; to == nil && !strings.HasPrefix(w, "--") {
				last = &own.options
			}
			*last = append(*last, option{name: w, not: not})
		default:
			if n := len(*last); n > 0 {
				(*last)[n-1].args = append((*last)[n-1].args, w)
			}
		}
		not = false
	}
}

// number reports whether a word is a negative number, and no option.
func number(w string) bool { return len(w) > 1 && w[1] >= '0' && w[1] <= '9' }
