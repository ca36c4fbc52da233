package plan

import (
	"weak"

	"kproxy.dev/kproxy/service"
)

// lineage says what a plan was made of, if both have the same service ports: they
// differ at these places, in order. The former plan isn't kept alive for that.
type lineage struct {
	from   weak.Pointer[Plan]
	differ []int
}

// Changes calls f with each service port that differs between two plans: with
// nil for was where it is new, with nil for is where it is gone. A plan shares
// what hasn't changed with the plan before, so this takes microseconds for ten
// thousand services, and next to nothing where p was made of old. It ends early
// when f returns false.
func Changes(old, p *Plan, f func(was, is *Service) bool) {
	if old != nil && p != nil && p.lineage.from.Value() == old {
		for _, i := range p.lineage.differ {
			if !f(old.Services[i], p.Services[i]) {
				return
			}
		}
		return
	}
	eachDifference(old.services(), p.services(), f)
}

// eachDifference is Changes for the services of two plans.
func eachDifference(before, now []*Service, f func(was, is *Service) bool) {
	if len(before) == len(now) && len(now) > 0 && &before[0] == &now[0] {
		return
	}
	for len(before)+len(now) > 0 {
		var was, is *Service
		switch order := compareFirst(before, now); {
		case order < 0:
			was, before = before[0], before[1:]
		case order > 0:
			is, now = now[0], now[1:]
		default:
			was, is, before, now = before[0], now[0], before[1:], now[1:]
		}
		if was != is && !f(was, is) {
			return
		}
	}
}

// compareFirst tells which list goes on with the smaller key; an empty one
// never does.
func compareFirst(a, b []*Service) int {
	switch {
	case len(b) == 0:
		return -1
	case len(a) == 0:
		return 1
	case a[0] == b[0]:
		return 0
	}
	return a[0].Port.Compare(b[0].Port.Key)
}

// SameHashes reports whether two lists of services, in key order, need the same
// rules of the kernel.
func SameHashes(a, b []*Service) bool {
	same := true
	eachDifference(a, b, func(was, is *Service) bool {
		same = was != nil && is != nil && was.KernelHash == is.KernelHash
		return same
	})
	return same
}

// Alike returns the services of a that need the same rules of the kernel by b, which is a
// itself where all do. Both are in key order.
func Alike(a, b []*Service) []*Service {
	var others []*Service // of a
	eachDifference(a, b, func(was, is *Service) bool {
		if was != nil && (is == nil || was.KernelHash != is.KernelHash) {
			others = append(others, was)
		}
		return true
	})
	if len(others) == 0 {
		return a
	}
	out := make([]*Service, 0, len(a)-len(others))
	for _, s := range a {
		if len(others) > 0 && s == others[0] {
			others = others[1:]
			continue
		}
		out = append(out, s)
	}
	return out
}

// find returns the service port named k of a list in key order, or nil. It looks
// at the place given first.
func find(list []*Service, k service.Key, at int) *Service {
	if at < len(list) && list[at].Port.Key == k {
		return list[at]
	}
	lo, hi := 0, len(list)
	for lo < hi {
		mid := (lo + hi) / 2
		switch c := list[mid].Port.Key.Compare(k); {
		case c == 0:
			return list[mid]
		case c < 0:
			lo = mid + 1
		default:
			hi = mid
		}
	}
	return nil
}

// services returns p's services; none for nil.
func (p *Plan) services() []*Service {
	if p == nil {
		return nil
	}
	return p.Services
}
