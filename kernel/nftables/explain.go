package nftables

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

var _ kernel.Comparer = (*Plane)(nil)

// Compare implements [kernel.Comparer]: by the elements that the services of one want, and by how
// many rules chains have.
func (p *Plane) Compare(one *plan.Plan, f service.Family) (out []kernel.Mismatch, err error) {
	t, err := openTables([]service.Family{f})
	if err != nil {
		return nil, err
	}
	defer t.close()
	t.mu.Lock()
	defer t.mu.Unlock()
	scope := newScope(true)
	in := fmt.Sprintf(" of table %s %s", nfWord(f), Name)
	var want, unwanted []member
	for _, s := range one.Services {
		m := scope.of([]service.Family{f}, s, true)
		is := map[place]bool{}
		for _, e := range m.list {
			is[e.place()] = true
		}
		for _, at := range addresses(s.Port) {
			for _, set := range []string{setUserspace, setRefused, setServices} {
				if x := (member{f, set, Element{Key: at.key}}); at.family == f && !is[x.place()] {
					unwanted = append(unwanted, x)
				}
			}
		}
		want = append(want, m.list...)
		scope.count(&m, 1)
	}
	have, err := t.look(append(want[:len(want):len(want)], unwanted...))
	if err != nil {
		return nil, err
	}
	text := func(e member) string { return t.sets[f][e.set].textOf(&e.Element) }
	for i, h := range have {
		switch {
		case i < len(want) && h == nil:
			out = append(out, kernel.Mismatch{Object: "element " + text(want[i]) + " of set " + want[i].set + in, Planned: "there", Kernel: "missing"})
		case i < len(want) && !h.same(&want[i].Element):
			out = append(out, kernel.Mismatch{Object: "element " + text(want[i]) + " of set " + want[i].set + in, Planned: "there", Kernel: text(member{f, want[i].set, *h})})
		case i >= len(want) && h != nil:
			x := unwanted[i-len(want)]
			out = append(out, kernel.Mismatch{Object: "element " + text(x) + " of set " + x.set + in, Planned: "not there", Kernel: "there"})
		}
	}
	chains, err := t.readRules()
	for _, c := range newRules(p.options, f, &one.Policy).withTreatments(scope.treatments[f]) {
		if n := chains[f][c.Name].rules; err == nil && n != len(c.Rules) {
			out = append(out, kernel.Mismatch{Object: "chain " + c.Name + in, Planned: countText(len(c.Rules)), Kernel: countText(n)})
		}
	}
	return out, err
}

func countText(n int) string {
	return strings.TrimSuffix(fmt.Sprintf("%d rules", n), map[bool]string{true: "s"}[n == 1])
}

// look asks for single elements; nil for those that aren't there.
func (t *tables) look(list []member) ([]*Element, error) {
	const atOnce = 64
	out := make([]*Element, len(list))
	var failure error
	for first := 0; first < len(list); first += atOnce {
		part := list[first:min(len(list), first+atOnce)]
		err := t.socket.Do(len(part), func(b []byte, i int) []byte {
			e := &part[i]
			b = header(b, unix.NFT_MSG_GETSETELEM, 0, e.family)
			b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_TABLE, Name)
			b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, e.set)
			return netlink.AppendNested(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b []byte) []byte {
				return netlink.AppendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
					if b = netlink.AppendData(b, unix.NFTA_SET_ELEM_KEY, []byte(e.Key)...); e.End != "" {
						b = netlink.AppendData(b, netlink.SetElemKeyEnd, []byte(e.End)...)
					}
					return b
				})
			})
		}, func(i int, body []byte, err error) {
			switch {
			case err != nil && err != unix.ENOENT:
				failure = err
			case len(body) >= netlink.SizeofNetfilter:
				readElements(body[netlink.SizeofNetfilter:], func(e Element) { out[first+i] = &e })
			}
		})
		if err != nil {
			return nil, fmt.Errorf("look up elements: %w", err)
		}
	}
	return out, failure
}
