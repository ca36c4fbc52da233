package web

import (
	"math"
	"time"

	"kproxy.dev/kproxy/plan"
)

// The curve has hours in steps that show a short outage.
const (
	curveStep  = 10 * time.Second
	curveSpan  = 6 * time.Hour
	curveMost  = 180                                                           // points of one answer
	curveSlots = int(curveSpan/curveStep) + int(curveSpan/curveStep)/curveMost // one point more: the one that isn't over
)

// curve counts, in steps of time, the connections of all service ports by the data plane
// that they had. The zero value has counted nothing.
type curve struct {
	slots [curveSlots]*curveSlot // by the number of the step, modulo
	until time.Time              // up to when it has counted
}

type curveSlot struct {
	step   int64 // since 1970
	planes map[plan.DataPlane]curveCounts
}

type curveCounts struct{ began, failed, retried float32 }

// add counts what happened between two times, evenly.
func (c *curve) add(from, to time.Time, plane plan.DataPlane, was, is plan.Connections) {
	n := curveCounts{float32(grownBy(was.Attempts(), is.Attempts())), float32(grownBy(was.Failed, is.Failed)), float32(grownBy(was.Retried, is.Retried))}
	if n == (curveCounts{}) || !to.After(from) {
		return
	}
	if to.Sub(from) > curveSpan {
		from = to.Add(-curveSpan)
	}
	for at := from; at.Before(to); {
		end := at.Truncate(curveStep).Add(curveStep)
		share := float32(min(end.Sub(at), to.Sub(at))) / float32(to.Sub(from))
		s := c.slot(at.UnixNano() / int64(curveStep))
		sum := s.planes[plane]
		s.planes[plane] = curveCounts{sum.began + share*n.began, sum.failed + share*n.failed, sum.retried + share*n.retried}
		at = end
	}
}

// grownBy is the growth of a counter; one that went back belongs to a new service port.
func grownBy(was, is uint64) uint64 { return max(was, is) - was }

func (c *curve) slot(step int64) *curveSlot {
	at := &c.slots[step%int64(curveSlots)]
	if *at == nil || (*at).step != step {
		*at = &curveSlot{step, map[plan.DataPlane]curveCounts{}}
	}
	return *at
}

// Curve is the JSON of /api/v1/curve.
type Curve struct {
	StepSeconds float64                       `json:"stepSeconds"`
	Begin       time.Time                     `json:"begin"` // of the first step; the last one is over
	Planes      map[plan.DataPlane]CurvePlane `json:"planes"`
}

// CurvePlane has rates per second, oldest first.
type CurvePlane struct {
	New     []float64 `json:"new"`
	Failed  []float64 `json:"failed"`
	Retried []float64 `json:"retried"`
}

// Curve returns the connections of the time before now, which is at most curveSpan, in at
// most curveMost steps that are over. Data planes that had none are left out.
func (r *Recorder) Curve(now time.Time, span time.Duration) Curve {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if counted := r.curve.until; counted.Before(now) && now.Sub(counted) < curveStep {
		now = counted // what came since is in no step yet
	}
	steps := int64(span / curveStep)
	group := (steps + curveMost - 1) / curveMost
	points := steps / group
	first := (now.UnixNano()/int64(curveStep)/group - points) * group // the step of now isn't over: its rate would be a guess
	out := Curve{
		StepSeconds: float64(group) * curveStep.Seconds(), Begin: time.Unix(0, first*int64(curveStep)).UTC(),
		Planes: map[plan.DataPlane]CurvePlane{},
	}
	for i := range points * group {
		s := r.curve.slots[(first+i)%int64(curveSlots)]
		if s == nil || s.step != first+i {
			continue
		}
		for name, n := range s.planes {
			per := 1 / out.StepSeconds
			p, ok := out.Planes[name]
			if !ok {
				p = CurvePlane{make([]float64, points), make([]float64, points), make([]float64, points)}
				out.Planes[name] = p
			}
			p.New[i/group] += float64(n.began) * per
			p.Failed[i/group] += float64(n.failed) * per
			p.Retried[i/group] += float64(n.retried) * per
		}
	}
	for _, p := range out.Planes {
		for _, values := range [][]float64{p.New, p.Failed, p.Retried} {
			for i, v := range values {
				values[i] = math.Round(v*1000) / 1000
			}
		}
	}
	return out
}
