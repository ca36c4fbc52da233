package agent

import (
	"maps"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/kernel"
)

// setCounts is how many entries kproxy's ipsets have. Safe for concurrent use;
// the zero value is ready.
type setCounts struct {
	mu      sync.Mutex // one list at a time
	entries map[string]int
	at      time.Time
}

// setCountsAge is how old the counts may be: a list takes its turn among the
// requests by which services move.
const setCountsAge = time.Second

// affinitySets is what all sets of session affinity are counted as: there is one
// for each endpoint.
const affinitySets = kernel.Prefix + "AFF"

// count lists the sets without their entries, unless that was just done. After
// an error it returns the last counts.
func (c *setCounts) count(list func(func(string) bool) ([]kernel.SetState, error)) (map[string]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) < setCountsAge {
		return maps.Clone(c.entries), nil
	}
	states, err := list(nil)
	if err != nil {
		return maps.Clone(c.entries), err
	}
	c.entries, c.at = make(map[string]int, len(states)), time.Now()
	for _, s := range states {
		name := s.Name
		if strings.HasPrefix(name, affinitySets+"-") {
			name = affinitySets
		}
		c.entries[name] += s.Count
	}
	return maps.Clone(c.entries), nil
}
