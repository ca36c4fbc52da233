package plan

// Changes calls f with each service port that differs between two plans: with
// nil for was where it is new, with nil for is where it is gone. A plan shares
// what hasn't changed with the plan before, so this takes microseconds for ten
// thousand services. It ends early when f returns false.
func Changes(old, p *Plan, f func(was, is *Service) bool) {
	before, now := old.services(), p.services()
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

// services returns p's services; none for nil.
func (p *Plan) services() []*Service {
	if p == nil {
		return nil
	}
	return p.Services
}
