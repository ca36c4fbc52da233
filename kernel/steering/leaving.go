package steering

import (
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// addLeaving adds the endpoints that get no new connection, but may still have
// some: those that terminate, are down, or drain. The rules against packets that
// the kernel can't place have to know them, besides those in [kernel.SetEndpoint].
func (b *portal) addLeaving(p *plan.Plan) {
	for _, s := range p.Services {
		b.leave(s, everyEntry)
	}
}

func everyEntry(_, _ string) bool { return true }

// leave adds those of s that want takes, by set and entry.
func (b *portal) leave(s *plan.Service, want func(set, entry string) bool) {
	if s == nil || s.Beneath == plan.None || !s.Leaves() {
		return
	}
	for i := range s.Endpoints {
		if e := &s.Endpoints[i]; e.Leaves() {
			set, entry := kernel.FamilySet(kernel.SetLeaving, service.FamilyOf(e.Address.Addr())), kernel.AddressEntry(s.Port.Protocol, e.Address)
			if want(set, entry) {
				b.entries[set] = append(b.entries[set], entry)
			}
		}
	}
}

// leaveToo adds to both portals what services that didn't change have of the
// endpoints in which the portals differ: other services may have the same.
func leaveToo(before, now *portal, p *plan.Plan, changed map[service.Key]bool) {
	differs := map[string]map[string]bool{}
	found := false
	for _, f := range service.Families {
		set := kernel.FamilySet(kernel.SetLeaving, f)
		differs[set] = difference(before.entries[set], now.entries[set])
		found = found || len(differs[set]) > 0
	}
	if !found {
		return
	}
	want := func(set, entry string) bool { return differs[set][entry] }
	for _, s := range p.Services {
		if s.Leaves() && !changed[s.Port.Key] {
			before.leave(s, want)
			now.leave(s, want)
		}
	}
}

// difference returns what only one of two lists has.
func difference(a, b []string) map[string]bool {
	inA, out := make(map[string]bool, len(a)), map[string]bool{}
	for _, e := range a {
		inA[e], out[e] = true, true
	}
	for _, e := range b {
		if inA[e] {
			delete(out, e)
		} else {
			out[e] = true
		}
	}
	return out
}
