package agent

import (
	"maps"
	"sync"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// moveCounts counts how services go between userspace and the kernel. Safe for
// concurrent use; the zero value is ready.
type moveCounts struct {
	mu       sync.Mutex // the fast loop counts, scrapes read
	offloads map[plan.Cause]uint64
	recalls  map[plan.Cause]uint64
	catchUps uint64
	services map[service.Key]serviceMoves
}

// serviceMoves are those of one service port since it exists.
type serviceMoves struct {
	offloads, recalls uint64
	// bridged: userspace stands in until the kernel's rules have caught up; that
	// it stops isn't an offload, also where a pin hides that it was one before.
	bridged bool
}

// count counts what d moves. The first plan moves nothing: what stands in the kernel
// then was adopted.
func (m *moveCounts) count(d plan.Delta) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.services == nil {
		m.offloads, m.recalls = map[plan.Cause]uint64{}, map[plan.Cause]uint64{}
		m.services = map[service.Key]serviceMoves{}
	}
	for _, c := range d.Changes {
		is := c.Is
		if is == nil {
			delete(m.services, c.Key())
			continue
		}
		s := m.services[is.Port.Key]
		switch move := c.Move(); {
		case move == plan.NoMove:
			continue
		case move == plan.Recall:
			m.recalls[is.Cause]++
			s.recalls++
			s.bridged = false
		case move == plan.Offload && !s.bridged:
			m.offloads[is.Cause]++
			s.offloads++
		default:
			s.bridged = is.DataPlane == plan.Userspace
			if s.bridged {
				m.catchUps++
			}
		}
		m.services[is.Port.Key] = s
	}
}

// byCause returns the sums, which also hold the moves of services that are gone.
func (m *moveCounts) byCause() (offloads, recalls map[plan.Cause]uint64, catchUps uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.offloads), maps.Clone(m.recalls), m.catchUps
}

// byService returns the services that have moved.
func (m *moveCounts) byService() map[service.Key]serviceMoves {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.services)
}
