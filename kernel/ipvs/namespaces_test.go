package ipvs_test

import (
	"context"
	"fmt"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestOtherNamespaces: the virtual servers of other network namespaces, as
// containers may have them, hide none of this one's.
func TestOtherNamespaces(t *testing.T) {
	needsIPVS(t)
	const many = 80
	var hosts []*host
	var want kernel.Ruleset
	for range 3 {
		kerneltest.Namespace(t)
		h := newHost(t)
		var virtuals []kernel.Virtual
		for i := range many {
			virtuals = append(virtuals, virtual(service.TCP, fmt.Sprintf("10.96.0.%d:80", i), "10.2.0.2:9000", "10.2.0.3:9000"))
		}
		want = ruleset(virtuals...)
		h.bring(want)
		hosts = append(hosts, h)
	}
	for i, h := range hosts {
		servers, err := h.table.List()
		h.must(err)
		whole := 0
		for _, s := range servers {
			if len(s.Reals) == 2 && len(s.Connections) == 2 {
				whole++
			}
		}
		if whole != many {
			t.Errorf("namespace %d has %d virtual servers with 2 real servers each, want %d", i, whole, many)
		}
		w := ipvs.NewWatch(h.Backend, quiet{})
		w.Expect(want)
		if found, err := w.Check(context.Background()); err != nil || len(found) > 0 {
			t.Errorf("namespace %d: the watch finds %v, %v; want nothing", i, found, err)
		}
	}
}
