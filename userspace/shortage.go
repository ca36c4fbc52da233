package userspace

import (
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// What can be short.
const (
	shortDescriptors = iota
	shortSessions
	shortMemory
	shortages
)

var shortageNames = [shortages]plan.Resource{plan.Descriptors, plan.Sessions, plan.Memory}

// shortageLasts is for how long something counts as short after somebody found no room.
const shortageLasts = 10 * time.Second

// shortage is when somebody last found no room.
type shortage struct{ last atomic.Int64 } // in nanoseconds since epoch; 0 for never

func (x *shortage) note() { x.last.Store(sinceEpoch()) }

// Exhausted names what is short: clients wait or are refused for it, or others
// have given way in the last 10 s. It is empty where nothing is.
func (s *Server) Exhausted() []plan.Resource {
	var out []plan.Resource
	for i := range s.short {
		if last := s.short[i].last.Load(); last != 0 && time.Duration(sinceEpoch()-last) < shortageLasts {
			out = append(out, shortageNames[i])
		}
	}
	return out
}

// Shed returns how many connections or sessions had to make room for others, by
// [plan.ShedReasons].
func (s *Server) Shed(p service.Protocol) (out [shedReasons]uint64) {
	i := 0
	if p == service.UDP {
		i = 1
	}
	for r := range out {
		out[r] = s.shed[i][r].Load()
	}
	return out
}
