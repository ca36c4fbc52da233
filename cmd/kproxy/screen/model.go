package screen

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

	cursor    string // the service that the user put the cursor on, a key of services
	at        int    // its place in shown
	page      *page  // the service whose page is open; nil for none
	said      string // a message at the bottom
	pin       func(s plan.ServiceStatus, where string)
	note      func() string // a line of the caller's, such as of its traffic; nil for none
	guide     []Step
	guideAt   int
	states    []StepState // of guide
	answer    func(step int, answer string)
	lesson    bool      // the guide is what the screen is for
	reading   scroll    // how far a lesson's page is scrolled
	endpoints bool      // a line for each, below its service
	paused    time.Time // when the screen was paused
	// What came since: the last status, and events.
	laterStatus func()
	laterEvents []plan.Event
}

// Step is one thing to try, shown at the bottom; keys go back and forth.
type Step struct {
	Title    string
	Text     []string // paragraphs to read before
	Commands []string
	Look     string // what to look for
	Question bool   // an answer is to be typed
}

// StepState says how far the user is with a step.
type StepState struct {
	Done bool
	Said string // what is waited for, what is wrong with an answer, or what was seen
}

// Config holds what a Model starts with.
type Config struct {
	Theme     Theme
	Endpoints bool          // show a line for each endpoint
	Guide     []Step        // things to try
	Note      func() string // the line above the events; nil for none
	// Pin pins a service to "userspace", "kernel" or "auto". It returns at once, and what came of it
	// is for [Model.Say].
	Pin func(s plan.ServiceStatus, where string)
	// Answer takes in what was typed at a step with a question; it returns at once.
	Answer func(step int, answer string)
	// Lesson is a service, namespace/name[:port]/PROTOCOL, that the screen draws above the guide,
	// which gets all of the room; empty for the screen of all services.
	Lesson string
}

// New returns a Model that has seen nothing yet.
func New(c Config) *Model {
	m := &Model{
		screen: screen{theme: c.Theme}, note: c.Note, guide: c.Guide, states: make([]StepState, len(c.Guide)), endpoints: c.Endpoints,
		pin: c.Pin, answer: c.Answer, lesson: c.Lesson != "", services: map[string]*service{},
	}
	if m.lesson {
		m.page = &page{of: c.Lesson}
	}
	return m
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
	if m.page != nil && m.services[m.page.of] != nil {
		m.page.update(m.services[m.page.of])
	}
	m.arrange(now)
}

// Guided returns the step that is shown and its state; -1 without a guide.
func (m *Model) Guided() (step int, state StepState) {
	if len(m.guide) == 0 {
		return -1, state
	}
	return m.guideAt, m.states[m.guideAt]
}

// Guide sets the state of a step.
func (m *Model) Guide(step int, s StepState) { m.states[step] = s }

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
	m.keys.rows = len(m.shown)
	slices.SortFunc(m.shown, m.keys.order.compare)
	if i := slices.IndexFunc(m.shown, func(s *service) bool { return keyOf(s.status) == m.cursor }); i >= 0 {
		m.at = i // the cursor goes where its service goes
	}
	m.at = max(min(m.at, len(m.shown)-1), 0)
}

func last[T any](list []T, n int) []T {
	if over := len(list) - n; over > 0 {
		return slices.Clone(list[over:])
	}
	return list
}
