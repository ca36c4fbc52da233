package kube

import (
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
)

// How many events one node may write. Every node of a cluster writes events
// about the same Services, and after a start thousands of Services are offloaded
// at the same time: what one node writes is to be bearable for an API server
// that hears a thousand of them. The log has everything.
const (
	eventsBurst  = 50
	eventsPerMin = 6
	// repeatAfter is the least time between two events of one kind about one
	// Service.
	repeatAfter = time.Minute
	maxLimited  = 4096 // that limits remembers
)

// limited is what events are told apart by.
type limited struct {
	service        name
	reason, action string
}

// limits says which events may be written. Warnings have a budget of their
// own: they are rare, and news. Safe for concurrent use.
type limits struct {
	now              func() time.Time
	normal, warnings flowcontrol.PassiveRateLimiter

	mu   sync.Mutex
	last map[limited]time.Time
}

func newLimits() limits {
	budget := func() flowcontrol.PassiveRateLimiter {
		return flowcontrol.NewTokenBucketPassiveRateLimiter(eventsPerMin/60.0, eventsBurst)
	}
	return limits{now: time.Now, normal: budget(), warnings: budget(), last: map[limited]time.Time{}}
}

// allow reports whether l may be written now.
func (m *limits) allow(l limited, warning bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	if t, ok := m.last[l]; ok && now.Sub(t) < repeatAfter {
		return false
	}
	budget := m.normal
	if warning {
		budget = m.warnings
	}
	if !budget.TryAccept() {
		return false
	}
	if len(m.last) >= maxLimited {
		for k, t := range m.last {
			if now.Sub(t) >= repeatAfter {
				delete(m.last, k)
			}
		}
	}
	m.last[l] = now
	return true
}
