package trace

import (
	"net/netip"
	"strings"
	"testing"
)

// TestPacketIsComparedWithItsWay: what a packet met beside what is predicted for where it went.
func TestPacketIsComparedWithItsWay(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.2.0.2:80"), netip.MustParseAddrPort("10.2.0.3:80")
	rule := func(hook, leg, text, outcome string) Step {
		return Step{Hook: hook, Leg: leg, Table: "t", Chain: "c", Kind: KindRule, Text: text, Outcome: outcome}
	}
	legacy := rule("FORWARD", a.String(), "legacy", "matches: accept")
	legacy.Silent = true
	p := Result{Verdict: Forwarded, Candidates: []Candidate{{Endpoint: a, Probability: 0.5}, {Endpoint: b, Probability: 0.5}}, Steps: []Step{
		rule("PREROUTING", "", "first", "matches: jump to x"),
		rule("PREROUTING", "", "redirect", "no match"),
		rule("PREROUTING", "", "to a", "by chance: DNAT"),
		rule("PREROUTING", "", "to b", "matches: DNAT"),
		rule("FORWARD", a.String(), "accept a", "matches: accept"),
		rule("FORWARD", b.String(), "accept b", "matches: accept"),
		legacy,
	}}
	for _, c := range []struct {
		name   string
		fate   Fate
		to     netip.AddrPort
		met    string // steps, PREROUTING's before the slash
		signs  string // of the steps that come out
		differ string // what the difference says
	}{
		{"one way", Sent, a, "first,to a/accept a", "===", ""},
		{"the other way", Sent, b, "first,to b/accept b", "===", ""},
		{"a foreign rule", Sent, a, "first,drop?,to a/accept a", "=+==", "met drop?"},
		{"a rule that was not to match", Sent, a, "first,redirect,to a/accept a", "=+==", "redirect"},
		{"a rule that was left out", Sent, a, "to a/accept a", "-==", "didn't meet first"},
		{"another endpoint's rule", Sent, a, "first,to a/accept b", "==+-", "met accept b"},
		{"stopped where it was to be accepted", Stopped, a, "first,to a/drop", "==+", "met drop"},
		{"an endpoint that isn't one", Sent, netip.MustParseAddrPort("10.2.0.9:80"), "first,to a", "==", "sent to 10.2.0.9:80"},
		{"lost on the way", Lost, a, "first,to a", "==", "wasn't seen any more"},
	} {
		f := flight{Packet: Packet{Fate: c.fate, To: c.to}, first: netip.MustParseAddrPort("10.96.0.10:80")}
		hook := "PREROUTING"
		for part := range strings.SplitSeq(c.met, "/") {
			for text := range strings.SplitSeq(part, ",") {
				f.Steps = append(f.Steps, MetStep{Hook: hook, Table: "t", Chain: "c", Text: text, Met: true})
			}
			hook = "FORWARD"
		}
		f.compare(&p)
		signs := ""
		for _, s := range f.Steps {
			signs += map[[2]bool]string{{true, true}: "=", {true, false}: "+", {false, true}: "-"}[[2]bool{s.Met, s.Predicted}]
		}
		if signs != c.signs || (c.differ == "") != (f.Verdict == AsPredicted) || !strings.Contains(f.Difference, c.differ) {
			t.Errorf("%s: %s, %q, steps %s, want %s", c.name, f.Verdict, f.Difference, signs, c.signs)
		}
	}
}
