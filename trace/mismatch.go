package trace

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// compare looks whether the kernel has what the plan wants for the service.
func (t *tracer) compare() {
	if t.proxy == nil {
		t.lookForOwn()
		return
	}
	if t.service == nil {
		return
	}
	// Objects of one service depend on it and the policy, so a plan of it alone
	// wants the same of them, whatever the number of services.
	one := *t.proxy.Plan
	one.Services = []*plan.Service{t.service}
	if t.proxy.Render == nil {
		t.comparePortal(&one, nil)
		return
	}
	want := t.proxy.Render(&one)
	f := t.frontend.Family
	var sets []kernel.Set
	if t.anyStopped() { // sets of endpoints may be large, and are read in whole
		sets = slices.DeleteFunc(want.Sets, func(s kernel.Set) bool { return s.Family != f })
	}
	t.comparePortal(&one, sets)
	for _, j := range want.Jumps[f] {
		t.compareJump(j)
	}
	reached := false
	for _, c := range want.Chains[f] {
		if met := t.seen.steps[chain{c.Table, c.Name}]; c.Owner == t.service.Port.Key && len(met) > 0 {
			reached = true
			t.compareChain(c, met)
		}
	}
	strayed := slices.ContainsFunc(t.ends, func(e end) bool { return t.strayed(e.way) })
	if t.service.DataPlane == plan.IPTables && !reached && !strayed && t.forecast == nil && t.metNAT() && t.service.VerdictFor(t.frontend, t.client, &t.proxy.Plan.Policy) == plan.Forward {
		t.mismatch("the way to "+t.serviceName()+"'s chain in table nat", "rules that lead there", "no rule that the packet meets")
	}
	t.compareShared()
	t.compareVirtual(&want)
	if !strayed {
		t.compareDataPlane()
		t.compareEndpoints()
	}
}

// anyStopped reports whether some way leads to no endpoint.
func (t *tracer) anyStopped() bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.verdict != Forwarded })
}

// compareShared compares the chains that are no service's: those of a plan without
// services, but for the roots of the trees that lead to services.
func (t *tracer) compareShared() {
	none := *t.proxy.Plan
	none.Services = nil
	want := t.proxy.Render(&none)
	for _, c := range want.Chains[t.frontend.Family] {
		met := t.seen.steps[chain{c.Table, c.Name}]
		if c.Owner == (service.Key{}) && len(met) > 0 && !slices.Contains(iptables.Roots(), c.Name) {
			t.compareChain(c, met)
		}
	}
}

// compareDataPlane looks whether the kernel takes what a live kproxy is to carry
// itself.
func (t *tracer) compareDataPlane() {
	if t.service.DataPlane != plan.Userspace || t.forecast != nil || !t.proxy.Alive {
		return
	}
	for _, e := range t.ends {
		if e.endpoint.IsValid() {
			t.mismatch("the way to "+t.serviceName(), "by way of kproxy's listener", "to endpoints at once, by "+string(e.plane))
		}
	}
}

// metNAT reports whether the packet came to where destinations are translated: a
// rule of others may stop it before, or keep it from there (NOTRACK).
func (t *tracer) metNAT() bool {
	return len(t.seen.steps[chain{"nat", string(netfilter.Prerouting)}])+len(t.seen.steps[chain{"nat", string(netfilter.Output)}]) > 0
}

func (t *tracer) mismatch(object, planned, found string) {
	m := Mismatch{object, planned, found}
	if !slices.Contains(t.mismatches, m) {
		t.mismatches = append(t.mismatches, m)
	}
}

// settle is how long a set may differ while kproxy follows a change.
const settle = 50 * time.Millisecond

// comparePortal looks whether the service's addresses are in the sets that they
// are to be in, and in no other, and whether further sets have all their entries. What
// differs is looked at twice.
func (t *tracer) comparePortal(one *plan.Plan, further []kernel.Set) {
	found, err := t.portalDiffers(one, further)
	if len(found) > 0 {
		time.Sleep(settle)
		again, _ := t.portalDiffers(one, further)
		found = slices.DeleteFunc(found, func(m Mismatch) bool { return !slices.Contains(again, m) })
	}
	if err != nil {
		t.warn(SeverityWarning, "kproxy's sets can't be read: "+err.Error(), "sets", "")
	}
	for _, m := range found {
		t.mismatch(m.Object, m.Planned, m.Kernel)
	}
}

func (t *tracer) portalDiffers(one *plan.Plan, further []kernel.Set) ([]Mismatch, error) {
	want := map[string][]string{}
	for _, s := range slices.Concat(kernel.Portal(one), further) {
		if !s.Dynamic || want[s.Name] == nil {
			want[s.Name] = slices.Concat(want[s.Name], s.Entries)
		}
	}
	states, err := t.sight.sets(func(name string) bool { _, ok := want[name]; return ok })
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
				out = append(out, Mismatch{"entry " + e + " of set " + set, "there", "missing"})
			}
		}
	}
	for _, e := range kernel.UserEntries(t.service.Port) {
		for _, base := range []string{kernel.SetUser, kernel.SetReject, kernel.SetDrop} {
			set := base + strings.TrimPrefix(e.Set, kernel.SetUser)
			if !slices.Contains(want[set], e.Entry) && has(set, e.Entry) {
				out = append(out, Mismatch{"entry " + e.Entry + " of set " + set, "not there", "there"})
			}
		}
	}
	slices.SortFunc(out, func(a, b Mismatch) int { return cmp.Compare(a.Object, b.Object) })
	return out, nil
}

// ruleText is a rule without the words that append it to its chain.
func ruleText(s *netfilter.Step) string {
	return strings.TrimPrefix(s.Text, "-A "+s.Chain+" ")
}

// compareJump looks for a jump in a built-in chain that the packet met.
func (t *tracer) compareJump(j kernel.Jump) {
	met, ok := t.seen.steps[chain{j.Table, j.From}]
	if !ok {
		return
	}
	object := fmt.Sprintf("rule %q of chain %s in table %s", j.Rule, j.From, j.Table)
	for i := range met {
		if kernel.SameRule(ruleText(&met[i]), j.Rule) {
			return
		}
	}
	last := lastOf(met)
	switch {
	case slices.ContainsFunc(met, func(s netfilter.Step) bool { return s.Policy }):
		t.mismatch(object, "there", "missing") // the packet met the whole chain
	case j.Last || last == nil || kernel.Own(last.Chain) || strings.Contains(last.Text, kernel.Prefix):
		// A rule before it took the packet, as it may.
	default:
		t.mismatch(object, "there", fmt.Sprintf("not reached: %s ends the chain before (%s)", place(last), ruleText(last)))
	}
}

// lastOf is the last rule of a chain that was met; nil if none was.
func lastOf(met []netfilter.Step) *netfilter.Step {
	var last *netfilter.Step
	for i := range met {
		if s := &met[i]; !s.Policy && (last == nil || s.Index > last.Index) {
			last = s
		}
	}
	return last
}

// compareChain compares a chain with what the packet met of it.
// What is behind a rule that took the packet was not met, and isn't compared.
func (t *tracer) compareChain(want kernel.Chain, met []netfilter.Step) {
	met = slices.Clone(met)
	slices.SortFunc(met, func(a, b netfilter.Step) int { return a.Index - b.Index })
	in := fmt.Sprintf(" of chain %s in table %s", want.Name, want.Table)
	rules, at := want.Text(), 0
	for i := range met {
		text := ruleText(&met[i])
		same := slices.IndexFunc(rules[at:], func(r string) bool { return kernel.SameRule(r, text) })
		if same < 0 {
			t.mismatch(fmt.Sprintf("rule %q%s", text, in), "not there", fmt.Sprintf("rule %d", met[i].Index))
			continue
		}
		for _, r := range rules[at : at+same] {
			t.mismatch(fmt.Sprintf("rule %q%s", r, in), "there", "missing")
		}
		at += same + 1
	}
	if last := lastOf(met); last != nil && t.took(last, maxHops) {
		return
	}
	for _, r := range rules[at:] {
		t.mismatch(fmt.Sprintf("rule %q%s", r, in), "there", "missing")
	}
}

// took reports whether no packet goes on behind a rule, which ends its chain
// itself or leads to one that lets none return.
func (t *tracer) took(s *netfilter.Step, depth int) bool {
	to, jumps := strings.CutPrefix(s.Outcome, "jump to ")
	if s.Matched != netfilter.Yes || !jumps || depth == 0 {
		return s.Matched == netfilter.Yes && !jumps
	}
	last := lastOf(t.seen.steps[chain{s.Table, to}])
	return last != nil && last.Outcome != "return" && t.took(last, depth-1)
}

// compareEndpoints names endpoints that the plan uses and the kernel doesn't, or
// the other way round, where the kernel chooses.
func (t *tracer) compareEndpoints() {
	if t.forecast != nil || t.service.VerdictFor(t.frontend, t.client, &t.proxy.Plan.Policy) != plan.Forward {
		return
	}
	reached := map[string]bool{}
	for _, e := range t.ends {
		if e.endpoint.IsValid() {
			reached[e.endpoint.String()] = true
		}
	}
	if len(reached) == 0 || len(reached) >= maxLegs {
		return
	}
	planned := map[string]bool{}
	for _, b := range t.service.Backends(t.frontend, t.client, &t.proxy.Plan.Policy) {
		a := b.Address.String()
		if planned[a] = true; b.Weight > 0 && !reached[a] && !t.stays() {
			t.mismatch("endpoint "+a, "gets new connections", "nothing leads there")
		}
	}
	for _, e := range t.ends {
		if a := e.endpoint; a.IsValid() && !planned[a.String()] {
			t.mismatch("endpoint "+a.String(), "gets no connections", "gets "+percent(e.share)+" of them")
		}
	}
}

// stays reports whether the client may be led to one endpoint only, by affinity.
func (t *tracer) stays() bool { return t.service.Port.Affinity > 0 }

// compareVirtual compares the virtual server at the address, if there is to be
// one.
func (t *tracer) compareVirtual(want *kernel.Ruleset) {
	planned, ok := want.Virtual(t.req.Protocol, t.req.Address)
	if !ok {
		return
	}
	name := fmt.Sprintf("virtual server %s %s", t.req.Protocol, t.req.Address)
	if a := t.req.Address.Addr(); slices.Contains(want.Addresses, a) && t.sight.addresses.links[a] != kernel.DummyLink {
		t.mismatch("address "+a.String()+" on link "+kernel.DummyLink, "there", "missing")
	}
	found, ok, err := t.sight.virtual(t.req.Protocol, t.req.Address)
	if err != nil {
		t.warn(SeverityWarning, err.Error(), "IPVS", "")
		return
	}
	if !ok {
		t.mismatch(name, "there", "missing")
		return
	}
	if found.Scheduler != planned.Scheduler {
		t.mismatch("scheduler of "+name, planned.Scheduler, found.Scheduler)
	}
	if found.Persistence != planned.Persistence {
		t.mismatch("persistence of "+name, fmt.Sprint(planned.Persistence, " s"), fmt.Sprint(found.Persistence, " s"))
	}
	weights := map[string]uint32{}
	for _, r := range found.Reals {
		weights[r.Address.String()] = r.Weight
	}
	for _, r := range planned.Reals {
		w, ok := weights[r.Address.String()]
		delete(weights, r.Address.String())
		object := "real server " + r.Address.String() + " of " + name
		switch {
		case !ok:
			t.mismatch(object, fmt.Sprint("weight ", r.Weight), "missing")
		case w != r.Weight:
			t.mismatch(object, fmt.Sprint("weight ", r.Weight), fmt.Sprint("weight ", w))
		}
	}
	for a, w := range weights {
		if w > 0 { // what drains has weight 0
			t.mismatch("real server "+a+" of "+name, "not there", fmt.Sprint("weight ", w))
		}
	}
}

// lookForOwn looks for the address in kproxy's sets where no kproxy can be asked.
func (t *tracer) lookForOwn() {
	bases := []string{kernel.SetUser, kernel.SetReject, kernel.SetDrop, kernel.SetVirtual}
	states, err := t.sight.sets(func(name string) bool {
		return slices.ContainsFunc(bases, func(b string) bool { return strings.HasPrefix(name, b+"-") })
	})
	if err != nil {
		t.warn(SeverityWarning, "kproxy's sets can't be read: "+err.Error(), "sets", "")
	}
	entry, port := kernel.AddressEntry(t.req.Protocol, t.req.Address), fmt.Sprint(t.req.Address.Port())
	for _, s := range states {
		at := ""
		switch {
		case slices.Contains(s.Entries, entry):
			at = entry
		case s.Type == kernel.BitmapPort && s.Name == kernel.NodePortSet(kernel.SetUser, t.req.Protocol, service.FamilyOf(t.req.Address.Addr())) && t.sight.local(t.req.Address.Addr()) && slices.Contains(s.Entries, port):
			at = port
		default:
			continue
		}
		t.known = true
		t.warn(SeverityNote, fmt.Sprintf("the address is one of kproxy's: entry %s is in set %s", at, s.Name), "set "+s.Name, "")
		if strings.HasPrefix(s.Name, kernel.SetUser) && len(t.ends) > 0 && !t.anyGoes() {
			state, remedy := "isn't running", "start kproxy (kproxy run)"
			if t.silent != "" {
				state, remedy = "hangs", "restart kproxy"
			}
			t.warn(SeverityError, fmt.Sprintf("%s is served in userspace, but kproxy %s, and the kernel has no rules of its own for it", t.req.Address, state), "set "+s.Name,
				remedy+"; with --mode iptables, ipvs or auto the kernel serves while kproxy is dead")
		}
	}
}
