package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// manyVirtuals are n virtual servers with two real servers each.
func manyVirtuals(n int) []kernel.Virtual {
	out := make([]kernel.Virtual, n)
	for i := range out {
		out[i] = virtual(service.TCP, fmt.Sprintf("10.96.%d.%d:80", i/250, i%250+1),
			fmt.Sprintf("10.200.%d.%d:8080", i/250, i%250+1), fmt.Sprintf("10.201.%d.%d:8080", i/250, i%250+1))
	}
	return out
}

// BenchmarkOneChange is an endpoint more, then less, among other services: one
// entry and one real server added; then a real server without connections
// removed. Apply is the same however many services there are; Diff compares two
// rulesets that share what didn't change.
func BenchmarkOneChange(b *testing.B) {
	kerneltest.Namespace(b)
	needsIPVS(b)
	h := newHost(b)
	for _, n := range []int{100, 1000, 5000} {
		virtuals := manyVirtuals(n)
		less := ruleset(virtuals...)
		start := time.Now()
		h.bring(less)
		took := time.Since(start)
		i := n / 2
		virtuals[i].Reals = append(virtuals[i].Reals[:2:2], kernel.Real{Address: netip.MustParseAddrPort("10.202.0.1:8080"), Weight: 1})
		more := ruleset(virtuals...)
		for k, from := range less.Virtuals { // as a renderer that remembers has it
			if len(from.Reals) == len(more.Virtuals[k].Reals) {
				more.Virtuals[k].Reals = from.Reals
			}
		}
		more2, less2 := kernel.Diff(less, more), kernel.Diff(more, less)
		apply := func(ops kernel.Ops) {
			if _, err := h.Apply(context.Background(), ops); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("services=%d/apply", n), func(b *testing.B) {
			for b.Loop() {
				apply(more2)
				apply(less2)
			}
		})
		b.Run(fmt.Sprintf("services=%d/diff+apply", n), func(b *testing.B) {
			for b.Loop() {
				apply(kernel.Diff(less, more))
				apply(kernel.Diff(more, less))
			}
		})
		b.Logf("from nothing to %d services: %v", n, took)
		h.bring(kernel.Ruleset{})
	}
}

// BenchmarkRequests adds a thousand real servers and deletes them, a request a system
// call, and as many as go.
func BenchmarkRequests(b *testing.B) {
	kerneltest.Namespace(b)
	needsIPVS(b)
	h := newHost(b)
	v := manyVirtuals(1)[0]
	h.must(change(h.table, ipvs.Add, v))
	var there, gone []ipvs.Request
	for i := range 1000 {
		r := kernel.Real{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 203, byte(i / 250), byte(i%250 + 1)}), 80), Weight: 1}
		there = append(there, ipvs.Request{Do: ipvs.Add, Virtual: v, Real: r})
		gone = append(gone, ipvs.Request{Do: ipvs.Delete, Virtual: v, Real: r})
	}
	for name, atOnce := range map[string]int{"one-by-one": 1, "together": len(there)} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				for _, requests := range [][]ipvs.Request{there, gone} {
					for part := range slices.Chunk(requests, atOnce) {
						h.must(errors.Join(h.table.Change(part...)...))
					}
				}
			}
		})
	}
}

// BenchmarkWatch is a check of which nothing comes.
func BenchmarkWatch(b *testing.B) {
	kerneltest.Namespace(b)
	needsIPVS(b)
	h := newHost(b)
	for _, n := range []int{100, 1000, 5000} {
		want := ruleset(manyVirtuals(n)...)
		h.bring(want)
		watch := ipvs.NewWatch(h.Backend, quiet{})
		watch.Expect(want)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			for b.Loop() {
				if found, err := watch.Check(context.Background()); err != nil || len(found) > 0 {
					b.Fatal(found, err)
				}
			}
		})
		b.Run(fmt.Sprintf("services=%d/observe", n), func(b *testing.B) {
			for b.Loop() {
				if _, err := h.Observe(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
		h.bring(kernel.Ruleset{})
	}
}

// TestManyAddresses: 5,000 addresses are put on the link and taken off.
func TestManyAddresses(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	var want []netip.Addr
	for i := range 4000 {
		want = append(want, netip.AddrFrom4([4]byte{10, 96, byte(i / 250), byte(i%250 + 1)}))
	}
	for i := range 1000 {
		want = append(want, netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1)))
	}
	timed := func(what string, do func() error) {
		t.Helper()
		start := time.Now()
		h.must(do())
		t.Logf("%s of %d addresses: %v", what, len(want), time.Since(start))
	}
	timed("making the link", h.link.Ensure)
	timed("adding", func() error { return changed(h.link.Add(want...)) })
	timed("adding again", func() error { return changed(h.link.Add(want...)) })
	var have ipvs.LinkState
	timed("listing", func() (err error) {
		have, err = h.link.State()
		return err
	})
	if diff := cmp.Diff(ipvs.LinkState{Exists: true, Up: true, Addresses: want}, have, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("the link (-want +got):\n%s", diff)
	}
	timed("deleting half", func() error { return changed(h.link.Delete(want[:2500]...)) })
	timed("deleting again", func() error { return changed(h.link.Delete(want[:2500]...)) })
	timed("removing the link with the other half", h.link.Remove)
	h.expect("addresses", "no link", h.addresses())
}
