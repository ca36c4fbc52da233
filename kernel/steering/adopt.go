package steering

import (
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Adopted returns the service ports of s that a data plane was serving when have was
// read: it has them, as served says, and none of their addresses is in a userspace set. A
// kproxy that starts leaves them where they are.
func Adopted(have kernel.Ruleset, s *service.Snapshot, served func(*service.Port) bool) map[service.Key]bool {
	user := map[string]map[string]bool{}
	for _, set := range have.Sets {
		entries := make(map[string]bool, len(set.Entries))
		for _, e := range set.Entries {
			entries[e] = true
		}
		user[set.Name] = entries
	}
	out := map[service.Key]bool{}
	if user[kernel.FamilySet(kernel.SetUser, service.IPv4)] == nil {
		return out // no redirect sets: nothing says who served them
	}
	for p := range s.All() {
		if served(p) && !slices.ContainsFunc(UserEntries(p), func(e kernel.SetEntry) bool { return user[e.Set][e.Entry] }) {
			out[p.Key] = true
		}
	}
	return out
}
