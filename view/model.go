package view

import (
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// maxEvents bounds what a Model remembers of what happened.
const maxEvents = 200

// Model is the screen of all services. Start from [New].
type Model struct {
	screen

	status   plan.Status
	received time.Time // when status came; zero before the first
	services map[string]*service
	shown    []*service // those that pass the filter, in order
	events   []plan.Event

	note      func() string // a line of the caller's, such as of its traffic; nil for none
	guide     []Step
	guideAt   int
	endpoints bool      // a line for each, below its service
	paused    time.Time // when the screen was paused
	// What came since: the last status, and events.
	laterStatus func()
	laterEvents []plan.Event
}

// Step is one thing to try, shown at the bottom; keys go back and forth.
type Step struct {
	Title    string
	Commands []string
	Look     string // what to look for
}

// Config is what a Model starts with.
type Config struct {
	Theme     Theme
	Endpoints bool          // show a line for each endpoint
	Guide     []Step        // things to try
	Note      func() string // the line above the events; nil for none
}

// New returns a Model that has seen nothing yet.
func New(c Config) *Model {
	return &Model{screen: screen{theme: c.Theme}, note: c.Note, guide: c.Guide, endpoints: c.Endpoints, services: map[string]*service{}}
}

// Update takes in a status of now.
func (m *Model) Update(st plan.Status, now time.Time) {
	if m.keys.paused {
		m.laterStatus = func() { m.Update(st, now) }
		return
	}
	m.gone = ""
	if st.UptimeSeconds < m.status.UptimeSeconds { // it was started again, and counts from 0
		for _, s := range m.services {
			s.restart()
		}
	}
	m.status, m.received = st, now
	seen := make(map[string]bool, len(st.Services))
	for i := range st.Services {
		s := &st.Services[i]
		key := keyOf(s)
		seen[key] = true
		if m.services[key] == nil {
			m.services[key] = &service{name: s.Title(), search: searchText(s)}
		}
		m.services[key].update(s, now)
	}
	for key := range m.services {
		if !seen[key] {
			delete(m.services, key)
		}
	}
	m.arrange(now)
}

// Event takes in something that happened.
func (m *Model) Event(e plan.Event) {
	if m.keys.paused {
		m.laterEvents = last(append(m.laterEvents, e), maxEvents)
		return
	}
	m.events = last(append(m.events, e), maxEvents)
}

// pause freezes the screen, or shows what came meanwhile.
func (m *Model) pause(now time.Time) {
	m.keys.paused = !m.keys.paused
	if m.keys.paused {
		m.paused, m.laterStatus, m.laterEvents = now, func() {}, nil
		return
	}
	m.laterStatus()
	m.events = last(append(m.events, m.laterEvents...), maxEvents)
}

// arrange filters and sorts what is shown.
func (m *Model) arrange(now time.Time) {
	m.shown = m.shown[:0]
	for _, s := range m.services {
		if m.keys.matches(s.search, string(s.status.DataPlane), string(s.status.State)) {
			s.rank, s.active = s.attention(now), s.busy()
			m.shown = append(m.shown, s)
		}
	}
	slices.SortFunc(m.shown, m.keys.order.compare)
}

func last[T any](list []T, n int) []T {
	if over := len(list) - n; over > 0 {
		return slices.Clone(list[over:])
	}
	return list
}
