package kernel

import (
	"iter"
	"slices"
	"strings"
)

// SavedLines yields the lines that iptables-save, or iptables -S, has printed, without their ends. What is quoted, as a comment,
// may have line ends of its own: they are the rule's, and no line that it holds is one (xtables_save_string). A quote opens right
// behind an option: names, as of chains and sets, are printed as they are, and may have one.
func SavedLines(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for len(text) > 0 {
			end := lineEnd(text)
			if !yield(strings.TrimSuffix(text[:end], "\r")) {
				return
			}
			text = text[min(end+1, len(text)):]
		}
	}
}

// lineEnd returns where the first of SavedLines ends in text.
func lineEnd(text string) int {
	end := strings.IndexByte(text, '\n')
	if end < 0 {
		end = len(text)
	}
	if text[0] == '#' || !strings.Contains(text[:end], ` "`) {
		return end
	}
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && quoted:
			i++
		case c == '"' && (quoted || i > 0 && text[i-1] == ' ' && strings.HasPrefix(text[strings.LastIndexByte(text[:i-1], ' ')+1:], "--")):
			quoted = !quoted
		case c == '\n' && !quoted:
			return i
		}
	}
	return len(text)
}

// SameRule reports whether two rules in iptables-save's form say the same. They
// are printed alike by the versions that kproxy is tested with; another one may
// quote differently, print matches in another order, or name the protocol's
// match where nothing needs it. Telling such rules apart would rewrite them
// for ever.
func SameRule(a, b string) bool {
	return a == b || slices.Equal(clauses(a), clauses(b))
}

// SameRules is SameRule for the rules of a chain.
func SameRules(a, b []string) bool {
	return slices.EqualFunc(a, b, SameRule)
}

// clauses takes a rule apart into options with their arguments, each under the
// match or target it belongs to, in order of text. All of them must hold, so
// their order in the rule doesn't matter.
func clauses(rule string) []string {
	var out []string
	var clause []string
	owner, not := "", false
	end := func() {
		if len(clause) > 0 {
			out = append(out, strings.Join(clause, "\x00"))
		}
		clause = nil
	}
	words := Words(rule)
	for i := 0; i < len(words); i++ {
		w := words[i]
		switch {
		case w == "!":
			end()
			not = true
		case w == "-m" && i+1 < len(words):
			end()
			i++
			owner = words[i]
			if owner != "tcp" && owner != "udp" && owner != "sctp" {
				out = append(out, "-m "+owner)
			}
		case strings.HasPrefix(w, "-") && len(w) > 1:
			end()
			clause = []string{owner, w}
			if !strings.HasPrefix(w, "--") {
				clause[0] = ""
			}
			if not {
				clause, not = append(clause, "!"), false
			}
			if (w == "-j" || w == "-g") && i+1 < len(words) {
				owner = words[i+1]
			}
		default:
			clause = append(clause, w)
		}
	}
	end()
	slices.Sort(out)
	return out
}

// Words splits a rule into arguments as iptables-restore does: at spaces, with
// double quotes and backslashes.
func Words(rule string) []string {
	var out []string
	var word []byte
	quoted, some := false, false
	for i := 0; i < len(rule); i++ {
		switch c := rule[i]; {
		case c == '\\' && i+1 < len(rule):
			i++
			word, some = append(word, rule[i]), true
		case c == '"':
			quoted, some = !quoted, true
		case c == ' ' && !quoted:
			if some {
				out = append(out, string(word))
			}
			word, some = nil, false
		default:
			word, some = append(word, c), true
		}
	}
	if some {
		out = append(out, string(word))
	}
	return out
}
