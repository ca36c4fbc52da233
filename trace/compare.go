package trace

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// compare records where the kernel doesn't have what the plan wants for the service.
func (t *tracer) compare() {
	if t.proxy == nil {
		t.findOwnSets()
		return
	}
	if t.service == nil {
		return
	}
	// Objects of one service depend on it and the policy, so a plan of it alone wants the same
	// of them, whatever the number of services; what all services share is that of a plan of none.
	one, none := *t.proxy.Plan, *t.proxy.Plan
	one.Services, none.Services = []*plan.Service{t.service}, nil
	if t.proxy.Compare != nil {
		t.differs(func() ([]Mismatch, error) { return t.proxy.Compare(&one, t.frontend.Family) })
		return
	}
	if t.proxy.Render == nil {
		t.compareSets(&one, nil)
		return
	}
	want, f := t.proxy.Render(&one), t.frontend.Family
	var sets []kernel.Set
	if slices.ContainsFunc(t.ends, func(e end) bool { return e.verdict != Forwarded }) { // sets of endpoints may be large, and are read in whole
		sets = slices.DeleteFunc(want.Sets, func(s kernel.Set) bool { return s.Family != f })
	}
	t.compareSets(&one, sets)
	for _, j := range want.Jumps[f] {
		t.compareJump(j)
	}
	for _, c := range t.proxy.Render(&none).Chains[f] { // those that are empty lead to services
		if c.Owner == (service.Key{}) && len(c.Text()) > 0 {
			t.compareChain(c)
		}
	}
	for _, c := range want.Chains[f] {
		if c.Owner == t.service.Port.Key {
			t.compareChain(c)
		}
	}
	to := t.req.Address
	if slices.Contains(want.Addresses, to.Addr()) && t.host.addresses.links[to.Addr()] != kernel.DummyLink {
		t.mismatch("address "+to.Addr().String()+" on link "+kernel.DummyLink, "there", "missing")
	}
	for _, x := range t.explainers {
		differs, err := x.Compare(&want, t.req.Protocol, to)
		if err != nil {
			t.warn(SeverityWarning, err.Error(), string(t.service.DataPlane), "")
		}
		for _, m := range differs {
			t.mismatch(m.Object, m.Planned, m.Kernel)
		}
	}
}

func (t *tracer) mismatch(object, planned, found string) {
	if m := (Mismatch{Object: object, Planned: planned, Kernel: found}); !slices.Contains(t.mismatches, m) {
		t.mismatches = append(t.mismatches, m)
	}
}

// settle is how long a set may differ while kproxy follows a change.
const settle = 50 * time.Millisecond

// compareSets compares the sets that steer the service's addresses, and further ones.
func (t *tracer) compareSets(one *plan.Plan, further []kernel.Set) {
	t.differs(func() ([]Mismatch, error) { return t.setsDiffer(one, further) })
}

// differs records what differs, which is read twice.
func (t *tracer) differs(read func() ([]Mismatch, error)) {
	found, err := read()
	if len(found) > 0 {
		time.Sleep(settle)
		again, _ := read()
		found = slices.DeleteFunc(found, func(m Mismatch) bool { return !slices.Contains(again, m) })
	}
	if err != nil {
		t.warn(SeverityWarning, "kproxy's sets can't be read: "+err.Error(), "sets", "")
	}
	t.mismatches = append(t.mismatches, found...)
}

func (t *tracer) setsDiffer(one *plan.Plan, further []kernel.Set) ([]Mismatch, error) {
	want := map[string][]string{}
	for _, s := range slices.Concat(steering.Sets(one), further) {
		if !s.Dynamic || want[s.Name] == nil {
			want[s.Name] = slices.Concat(want[s.Name], s.Entries)
		}
	}
	states, err := t.host.sets(func(name string) bool { _, ok := want[name]; return ok })
	if err != nil {
		return nil, err
	}
	have := map[string][]string{}
	for _, s := range states {
		slices.Sort(s.Entries)
		have[s.Name] = s.Entries
	}
	has := func(set, entry string) bool { _, ok := slices.BinarySearch(have[set], entry); return ok }
	var out []Mismatch
	for set, entries := range want {
		for _, e := range entries {
			if !has(set, e) {
				out = append(out, Mismatch{Object: "entry " + e + " of set " + set, Planned: "there", Kernel: "missing"})
			}
		}
	}
	for _, e := range steering.UserEntries(t.service.Port) {
		for _, base := range []string{kernel.SetUser, kernel.SetReject, kernel.SetDrop} {
			set := base + strings.TrimPrefix(e.Set, kernel.SetUser)
			if !slices.Contains(want[set], e.Entry) && has(set, e.Entry) {
				out = append(out, Mismatch{Object: "entry " + e.Entry + " of set " + set, Planned: "not there", Kernel: "there"})
			}
		}
	}
	slices.SortFunc(out, func(a, b Mismatch) int { return cmp.Compare(a.Object, b.Object) })
	return out, nil
}

// compareJump compares a jump in a base chain that the packet met.
func (t *tracer) compareJump(j kernel.Jump) {
	met := slices.SortedFunc(slices.Values(t.met[chain{j.Table, j.From}]), func(a, b netfilter.Step) int { return a.Index - b.Index }) // the policy has 0
	if len(met) == 0 {
		return
	}
	object, same := fmt.Sprintf("rule %q of chain %s in table %s", j.Rule, j.From, j.Table), func(r string) bool { return kernel.SameRule(r, j.Rule) }
	if !slices.ContainsFunc(t.host.rules(j.Table, j.From), same) {
		t.mismatch(object, "there", "missing")
		return
	}
	last := &met[len(met)-1]
	text := strings.TrimPrefix(last.Text, "-A "+last.Chain+" ")
	if met[0].Policy || j.Last || isOwn(last) || slices.ContainsFunc(met, func(s netfilter.Step) bool { return same(strings.TrimPrefix(s.Text, "-A "+s.Chain+" ")) }) {
		return // a rule before it took the packet, as it may
	}
	t.mismatch(object, "there", fmt.Sprintf("not reached: %s ends the chain before (%s)", place(last), text))
}

// isOwn reports whether a rule is kproxy's.
func isOwn(s *netfilter.Step) bool {
	return kernel.Own(s.Chain) || strings.Contains(s.Text, kernel.Prefix) || netfilter.Own(s)
}

// compareChain compares a chain that the packet met, rule by rule.
func (t *tracer) compareChain(want kernel.Chain) {
	if len(t.met[chain{want.Table, want.Name}]) == 0 {
		return
	}
	in := fmt.Sprintf(" of chain %s in table %s", want.Name, want.Table)
	rules, at := want.Text(), 0
	for i, text := range t.host.rules(want.Table, want.Name) {
		same := slices.IndexFunc(rules[at:], func(r string) bool { return kernel.SameRule(r, text) })
		if same < 0 {
			t.mismatch(fmt.Sprintf("rule %q%s", text, in), "not there", fmt.Sprintf("rule %d", i+1))
			continue
		}
		for _, r := range rules[at : at+same] {
			t.mismatch(fmt.Sprintf("rule %q%s", r, in), "there", "missing")
		}
		at += same + 1
	}
	for _, r := range rules[at:] {
		t.mismatch(fmt.Sprintf("rule %q%s", r, in), "there", "missing")
	}
}

// findOwnSets finds the address in kproxy's sets where no kproxy can be asked.
func (t *tracer) findOwnSets() {
	states, err := t.host.sets(func(name string) bool {
		return slices.ContainsFunc([]string{kernel.SetUser, kernel.SetReject, kernel.SetDrop, kernel.SetVirtual}, func(b string) bool { return strings.HasPrefix(name, b+"-") })
	})
	if err != nil {
		t.warn(SeverityWarning, "kproxy's sets can't be read: "+err.Error(), "sets", "")
	}
	to := t.req.Address
	nodePorts := kernel.NodePortSet(kernel.SetUser, t.req.Protocol, service.FamilyOf(to.Addr()))
	for _, s := range states {
		at := kernel.AddressEntry(t.req.Protocol, to)
		if s.Type == kernel.BitmapPort && s.Name == nodePorts && t.host.local(to.Addr()) {
			at = fmt.Sprint(to.Port())
		}
		if !slices.Contains(s.Entries, at) {
			continue
		}
		t.warn(SeverityNote, fmt.Sprintf("the address is one of kproxy's: entry %s is in set %s", at, s.Name), "set "+s.Name, "")
		if strings.HasPrefix(s.Name, kernel.SetUser) && len(t.ends) > 0 && !t.anyForwarded() {
			state, remedy := "isn't running", "start kproxy (kproxy run)"
			if t.silent != "" {
				state, remedy = "hangs", "restart kproxy"
			}
			t.warn(SeverityError, fmt.Sprintf("%s is served in userspace, but kproxy %s, and the kernel has no rules of its own for it", to, state), "set "+s.Name,
				remedy+"; in every mode but userspace the kernel serves while kproxy is dead")
		}
	}
}
