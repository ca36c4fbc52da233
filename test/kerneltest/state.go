package kerneltest

import (
	"fmt"
	"maps"
	"slices"
)

// State prints kproxy's sets, virtual servers and addresses, what drains
// included, but not the lifetimes of entries. Rules aren't part of it.
func (h *Host) State() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := ""
	for _, name := range slices.Sorted(maps.Keys(h.sets)) {
		out += fmt.Sprintln("set", name, slices.Sorted(maps.Keys(h.sets[name].entries)))
	}
	for _, k := range h.servers() {
		m := h.virtuals[k]
		if m.foreign {
			continue
		}
		out += printVirtual("virtual server", m.Virtual)
		for _, a := range m.order() {
			if r := m.reals[a]; !r.foreign {
				out += fmt.Sprintf("  %s weight %d\n", a, r.weight)
			}
		}
	}
	if l := h.link; l != nil {
		for _, a := range l.sorted() {
			out += fmt.Sprintln("address", a)
		}
	}
	return out
}
