package ipvs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Text prints virtual servers as `ipvsadm -Ln` does, without its headings and
// counts of connections, by family, protocol and address; then the addresses on
// kproxy's link, as `ip -o address` names them.
func Text(r kernel.Ruleset) string {
	var b strings.Builder
	for _, v := range slices.SortedFunc(slices.Values(r.Virtuals), listOrder) {
		fmt.Fprintf(&b, "%s %s %s", strings.ToUpper(v.Protocol.String()), v.Address, v.Scheduler)
		if v.SchedFlags != 0 { // see schedulerFlags
			fmt.Fprintf(&b, " (%s-fallback)", v.Scheduler)
		}
		if v.Persistence > 0 {
			fmt.Fprintf(&b, " persistent %d", v.Persistence)
		}
		b.WriteByte('\n')
		for _, e := range v.Reals {
			fmt.Fprintf(&b, "  -> %s Masq %d\n", e.Address, e.Weight)
		}
	}
	for _, a := range r.Addresses {
		fmt.Fprintf(&b, "%s %s %s\n", kernel.DummyLink, linkFamily[service.FamilyOf(a)], kernel.HostPrefix(a))
	}
	return b.String()
}

var linkFamily = [2]string{service.IPv4: "inet", service.IPv6: "inet6"}

// Record returns [Sets] with the entries that they have when r is in the kernel
// and nothing drains.
func Record(r kernel.Ruleset) []kernel.Set {
	if len(r.Virtuals)+len(r.Addresses) == 0 {
		return nil
	}
	entries := map[string][]string{}
	for i := range r.Virtuals {
		v := &r.Virtuals[i]
		name := kernel.FamilySet(kernel.SetVirtual, service.FamilyOf(v.Address.Addr()))
		entries[name] = append(entries[name], kernel.AddressEntry(v.Protocol, v.Address))
	}
	for _, a := range r.Addresses {
		name := kernel.FamilySet(kernel.SetVIP, service.FamilyOf(a))
		entries[name] = append(entries[name], a.String())
	}
	out := Sets()
	for i := range out {
		out[i].Entries = entries[out[i].Name]
		slices.Sort(out[i].Entries)
	}
	return out
}

// listOrder compares virtual servers in the order that ipvsadm is meant to list them in.
func listOrder(a, b kernel.Virtual) int {
	return cmp.Or(
		cmp.Compare(service.FamilyOf(a.Address.Addr()), service.FamilyOf(b.Address.Addr())),
		cmp.Compare(a.Protocol, b.Protocol),
		a.Address.Compare(b.Address))
}
