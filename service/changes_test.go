package service

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestWith changes Services at random and compares with a Snapshot built from
// scratch.
func TestWith(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	type state struct {
		ports  []string // names of the ports
		number uint16
	}
	now := map[string]state{}
	build := func(names map[string]bool, node string) *Snapshot {
		var b Builder
		b.SetNode(Node{Name: node})
		for name, st := range now {
			if names != nil && !names[name] {
				continue
			}
			for _, port := range st.ports {
				k := key(name)
				k.Port = port
				mustAdd(t, &b, Port{Key: k, Number: st.number})
				b.AddEndpoint(k, endpoint(fmt.Sprintf("10.2.0.1:%d", st.number)))
			}
		}
		return b.Build()
	}
	got := build(nil, "n-0")
	for step := range 500 {
		changed := map[string]bool{}
		for range rng.IntN(4) {
			name := fmt.Sprintf("svc-%d", rng.IntN(12))
			changed[name] = true
			if rng.IntN(3) == 0 {
				delete(now, name)
				continue
			}
			now[name] = state{ports: []string{"a", "b", "c"}[:1+rng.IntN(3)], number: uint16(1 + rng.IntN(100))}
		}
		node := fmt.Sprintf("n-%d", step/100)
		var names []Name
		for name := range changed {
			names = append(names, Name{"default", name})
		}
		got = got.With(build(changed, node), names)
		want := build(nil, node)
		if got.Hash() != want.Hash() || got.Len() != want.Len() {
			t.Fatalf("step %d: %d ports, hash %x; built from scratch: %d, %x", step, got.Len(), got.Hash(), want.Len(), want.Hash())
		}
	}
}

// TestChanges walks through Snapshots made of one another in every way, also of wrong
// names, and compares what Changes finds between any two with what they hold.
func TestChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	numbers := map[string]uint16{}
	build := func() *Snapshot {
		var b Builder
		for name, number := range numbers {
			for port := range 1 + number%2 {
				k := key(name)
				k.Port = fmt.Sprint(port)
				mustAdd(t, &b, Port{Key: k, Number: number})
			}
		}
		return b.Build()
	}
	held := func(s *Snapshot) map[Key]uint16 {
		out := map[Key]uint16{}
		for p := range s.All() {
			out[p.Key] = p.Number
		}
		return out
	}
	all := []*Snapshot{{}}
	for range 1500 {
		var names []Name
		for range rng.IntN(4) {
			name := fmt.Sprintf("svc-%02d", rng.IntN(40))
			if numbers[name] = uint16(rng.IntN(4)); numbers[name] == 0 {
				delete(numbers, name)
			}
			if rng.IntN(4) > 0 { // else a source forgot it
				names = append(names, Name{"default", name})
			}
		}
		last := all[len(all)-1]
		var next *Snapshot
		switch rng.IntN(20) {
		case 0:
			next = build()
		case 1, 2, 3:
			next = build().Sharing(last)
		default:
			next = last.With(build(), names)
		}
		all = append(all, next)
		old := all[max(0, len(all)-1-rng.IntN(100))]
		was, is := held(old), held(next)
		want := map[Key]bool{}
		for k := range was {
			want[k] = is[k] != was[k]
		}
		for k := range is {
			want[k] = is[k] != was[k]
		}
		maps.DeleteFunc(want, func(_ Key, differs bool) bool { return !differs })
		got := map[Key]bool{}
		for i, j := range Changes(old, next) {
			if i >= 0 {
				got[old.entries[i].port.Key] = true
			}
			if j >= 0 {
				got[next.entries[j].port.Key] = true
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("changes %v, want %v", got, want)
		}
	}
}

// What the other Snapshot has of Services that didn't change is not taken over.
func TestWithTakesOnlyWhatChanged(t *testing.T) {
	one := func(name string, number uint16) *Snapshot {
		var b Builder
		mustAdd(t, &b, Port{Key: key(name), Number: number})
		return b.Build()
	}
	for _, name := range []string{"a", "web", "z"} {
		if got, want := one("web", 80).With(one(name, 81), nil), one("web", 80); got.Hash() != want.Hash() {
			t.Errorf("%s was taken over: %d ports", name, got.Len())
		}
	}
}

// What changed back, or in nothing that matters, is shared with the Snapshot before.
func TestWithShares(t *testing.T) {
	build := func(number uint16) *Snapshot {
		var b Builder
		mustAdd(t, &b, Port{Key: key("web"), Number: number})
		b.AddEndpoint(key("web"), endpoint("10.2.0.1:80"))
		return b.Build()
	}
	s := build(80)
	was, _, _ := s.At(0)
	for number, want := range map[uint16]bool{80: true, 81: false} {
		for how, next := range map[string]*Snapshot{
			"With": s.With(build(number), []Name{{"default", "web"}}), "Sharing": build(number).Sharing(s),
		} {
			is, eps, _ := next.At(0)
			if got := is == was; got != want || is.Number != number || len(eps) != 1 || next.Hash() != build(number).Hash() {
				t.Errorf("%s, port %d: the entry is shared: %v, want %v; it is %+v with %d endpoints", how, number, got, want, is, len(eps))
			}
		}
	}
}

// TestMerge: places of equal elements come together, others alone, in order; the
// walk ends when the caller does.
func TestMerge(t *testing.T) {
	a, b := []int{1, 3, 4, 7}, []int{2, 3, 7, 9}
	var got [][2]int
	for i, j := range Merge(len(a), len(b), func(i, j int) int { return a[i] - b[j] }) {
		got = append(got, [2]int{i, j})
	}
	if want := [][2]int{{0, -1}, {-1, 0}, {1, 1}, {2, -1}, {3, 2}, {-1, 3}}; !slices.Equal(got, want) {
		t.Errorf("places %v, want %v", got, want)
	}
	for range Merge(len(a), 0, nil) {
		break
	}
}
