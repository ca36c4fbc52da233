package upstream

import (
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	utiliptables "k8s.io/kubernetes/pkg/util/iptables"
	iptablestest "k8s.io/kubernetes/pkg/util/iptables/testing"

	"kproxy.dev/kproxy/service"
)

// tracer follows the first packet of a connection through the rules that the
// upstream proxier has written. Its own tracer is in a test file and can't be imported;
// its parser of rules can. A rule with a part that the tracer doesn't know fails the test.
type tracer struct {
	t      *testing.T
	chains map[chainName]*iptablestest.Chain
	rules  map[*iptablestest.Rule]*iptablestest.Rule // with every parameter known
}

type chainName struct {
	table utiliptables.Table
	chain string
}

func newTracer(t *testing.T, dump *iptablestest.IPTablesDump) *tracer {
	tr := &tracer{t: t, chains: map[chainName]*iptablestest.Chain{}, rules: map[*iptablestest.Rule]*iptablestest.Rule{}}
	for i := range dump.Tables {
		for j := range dump.Tables[i].Chains {
			c := &dump.Tables[i].Chains[j]
			tr.chains[chainName{dump.Tables[i].Name, string(c.Name)}] = c
		}
	}
	return tr
}

// packet is the first one of a connection.
type packet struct {
	protocol   service.Protocol
	source     netip.Addr
	to         netip.AddrPort
	sourceNode bool // source is one of this node's own addresses
	toNode     bool // so is to
}

// step holds a packet on its way through its chains, and what they have done to it.
type step struct {
	packet
	masqueraded bool
	translated  bool
	verdict     verdict // empty while nothing is decided
}

// trace returns everything that may become of p: rules that choose by chance, and
// those that remember clients, do either.
func (tr *tracer) trace(p packet) outcome {
	hooks := []chainName{{utiliptables.TableNAT, "PREROUTING"}}
	if p.sourceNode {
		hooks = []chainName{{utiliptables.TableNAT, "OUTPUT"}}
	}
	steps := []step{{packet: p}}
	out := outcome{}
	for _, hook := range hooks {
		steps = tr.hook(hook, steps)
	}
	for _, s := range steps {
		s.verdict = "" // DNAT is accepted by the table that does it, and by no other
		filters := []chainName{{utiliptables.TableFilter, "FORWARD"}}
		toNode := s.toNode && !s.translated
		switch {
		case p.sourceNode && toNode:
			filters = []chainName{{utiliptables.TableFilter, "OUTPUT"}, {utiliptables.TableFilter, "INPUT"}}
		case p.sourceNode:
			filters = []chainName{{utiliptables.TableFilter, "OUTPUT"}}
		case toNode:
			filters = []chainName{{utiliptables.TableFilter, "INPUT"}}
		}
		after := []step{s}
		for _, hook := range filters {
			after = tr.hook(hook, after)
		}
		for _, s := range after {
			switch {
			case s.verdict == reject || s.verdict == drop:
				out.add(s.verdict, "")
			case s.translated:
				out.add(forward, backendText(s.to, s.masqueraded))
			default:
				out.add(untouched, "")
			}
		}
	}
	return out
}

// hook runs a built-in chain for those steps that nothing is decided for yet.
func (tr *tracer) hook(name chainName, steps []step) (out []step) {
	for _, s := range steps {
		if s.verdict == reject || s.verdict == drop {
			out = append(out, s)
			continue
		}
		s.verdict = ""
		out = append(out, tr.chain(name, s)...)
	}
	return out
}

// chain runs one chain. Steps it returns without a verdict have reached its end.
func (tr *tracer) chain(name chainName, start step) (out []step) {
	c := tr.chains[name]
	if c == nil {
		tr.t.Fatalf("upstream's rules have no chain %s in table %s", name.chain, name.table)
	}
	at := []step{start}
	for _, raw := range c.Rules {
		rule := tr.known(raw)
		if !slices.ContainsFunc(at, func(s step) bool { matches, _ := tr.match(rule, &s); return matches }) {
			continue // as nearly always
		}
		var next []step
		for _, s := range at {
			matches, surely := tr.match(rule, &s)
			if !matches || !surely {
				next = append(next, s)
			}
			if !matches {
				continue
			}
			for _, s := range tr.jump(name.table, rule, s) {
				if s.verdict != "" {
					out = append(out, s)
				} else {
					next = append(next, s)
				}
			}
		}
		at = next
	}
	return append(out, at...)
}

// jump carries out a rule's target.
func (tr *tracer) jump(table utiliptables.Table, r *iptablestest.Rule, s step) []step {
	if r.Jump == nil {
		return []step{s} // a rule that only counts, or is a remark
	}
	switch target := r.Jump.Value; target {
	case "KUBE-MARK-MASQ":
		s.masqueraded = true
	case "DNAT":
		to, err := netip.ParseAddrPort(r.DNATDestination.Value)
		if err != nil {
			tr.t.Fatalf("rule %s: %v", r.Raw, err)
		}
		s.to, s.translated, s.verdict = to, true, forward
	case "REJECT":
		s.verdict = reject
	case "DROP":
		s.verdict = drop
	case "ACCEPT":
		s.verdict = untouched
	default:
		return tr.chain(chainName{table, target}, s)
	}
	return []step{s}
}

// idle are the parts of a rule that match always: a comment, which upstream's model of
// iptables keeps without its quotes in built-in chains, and a counter.
var idle = regexp.MustCompile(` -m comment --comment (?:"[^"]*"|[^"]+?)( -[a-zA-Z-])| -m nfacct --nfacct-name \S+`)

// known is r with all its parameters; the dump was parsed without those that upstream's
// tests don't look at.
func (tr *tracer) known(r *iptablestest.Rule) *iptablestest.Rule {
	if k := tr.rules[r]; k != nil {
		return k
	}
	k, err := iptablestest.ParseRule(idle.ReplaceAllString(r.Raw, "$1"), true)
	if err != nil {
		tr.t.Fatalf("rule %s: %v", r.Raw, err)
	}
	for name, value := range reflect.ValueOf(k).Elem().Fields() {
		if !value.IsZero() && !slices.Contains(evaluated, name.Name) {
			tr.t.Fatalf("the tracer doesn't know %s of rule %s", name.Name, r.Raw)
		}
	}
	tr.rules[r] = k
	return k
}

// evaluated are the fields of a rule that match and jump know, or that say nothing of
// which packets it is for.
var evaluated = []string{
	"Raw", "Chain", "Comment", "Protocol", "SourceAddress", "SourceType", "DestinationAddress", "DestinationType", "DestinationPort",
	"Jump", "Probability", "StatisticMode", "DNATDestination", "AffinityCheck", "AffinityName", "AffinitySeconds", "AffinitySet", "AffinityReap",
	"MarkCheck", "CTStateCheck",
}

// match reports whether r is for s, and whether it surely is: not where it throws dice
// or asks what it remembers of a client.
func (tr *tracer) match(r *iptablestest.Rule, s *step) (matches, surely bool) {
	is := func(v *iptablestest.IPTablesValue, fact bool) bool { return v == nil || fact != v.Negated }
	within := func(v *iptablestest.IPTablesValue, a netip.Addr) bool {
		return v == nil || tr.within(r, v.Value, a) != v.Negated
	}
	matches = is(r.Protocol, r.Protocol != nil && r.Protocol.Value == s.protocol.String()) &&
		is(r.DestinationPort, r.DestinationPort != nil && r.DestinationPort.Value == strconv.Itoa(int(s.to.Port()))) &&
		within(r.SourceAddress, s.source) && within(r.DestinationAddress, s.to.Addr()) &&
		is(r.SourceType, tr.local(r, r.SourceType, s.sourceNode)) &&
		is(r.DestinationType, tr.local(r, r.DestinationType, s.toNode && !s.translated)) &&
		is(r.MarkCheck, s.masqueraded) && is(r.CTStateCheck, r.CTStateCheck != nil && s.states(r.CTStateCheck.Value))
	return matches, r.Probability == nil && r.AffinityCheck == nil
}

// local is the fact that an address type asks for; upstream asks for no other than LOCAL.
func (tr *tracer) local(r *iptablestest.Rule, v *iptablestest.IPTablesValue, node bool) bool {
	if v != nil && v.Value != "LOCAL" {
		tr.t.Fatalf("the tracer doesn't know address type %s of rule %s", v.Value, r.Raw)
	}
	return node
}

func (tr *tracer) within(r *iptablestest.Rule, network string, a netip.Addr) bool {
	if p, err := netip.ParsePrefix(network); err == nil {
		return p.Contains(a)
	}
	one, err := netip.ParseAddr(network)
	if err != nil {
		tr.t.Fatalf("rule %s: %v", r.Raw, err)
	}
	return one == a
}

// states reports whether the connection is in one of the states listed.
func (s *step) states(list string) bool {
	for state := range strings.SplitSeq(list, ",") {
		if state == "NEW" || state == "DNAT" && s.translated {
			return true
		}
	}
	return false
}
