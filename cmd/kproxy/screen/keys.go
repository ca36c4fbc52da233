package screen

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// keys holds what keys have changed.
type keys struct {
	scroll
	filter string
	typing prompt // where keys go
	input  string // what is typed
	order  order
	paused bool
	help   bool
}

// scroll holds how far rows are scrolled.
type scroll struct {
	top  int // rows above the screen
	page int // rows on the screen, as last drawn
	rows int // how many there are
}

// prompt says what a line at the bottom asks for.
type prompt uint8

const (
	noPrompt prompt = iota
	filterPrompt
	commandPrompt
	answerPrompt
)

// prompts stand before and behind what is typed.
var prompts = [...][2]line{
	filterPrompt:  {"filter: ", "  Enter keeps it, Esc clears it"},
	commandPrompt: {":", "  pin userspace, pin kernel, pin auto; Enter does it, Esc doesn't"},
	answerPrompt:  {"answer: ", "  Enter gives it, Esc doesn't"},
}

// screen holds what all screens have.
type screen struct {
	theme Theme
	keys  keys
	gone  string    // why kproxy doesn't answer; empty while it does
	since time.Time // when it stopped answering
}

// Fail notes that kproxy didn't answer; what was known stays on the screen.
func (s *screen) Fail(err error, now time.Time) {
	if s.gone == "" {
		s.since = now
	}
	s.gone = err.Error()
}

// encode returns what the terminal gets of lines: at most height of them, none wider
// than width.
func (s *screen) encode(lines []line, width, height int) []string {
	out := make([]string, 0, height)
	for _, l := range lines[:min(len(lines), height)] {
		out = append(out, s.theme.encode(l.clip(width, s.theme.glyphs().ellipsis)))
	}
	return out
}

// Key takes in a key; it returns true when the user wants to leave.
func (m *Model) Key(k string, now time.Time) (quit bool) {
	m.said = ""
	asking, onPage := m.keys.typing, m.page != nil && m.keys.typing == noPrompt && !m.keys.help
	if onPage && (k == "esc" || k == "/") {
		if k == "esc" && !m.lesson {
			m.page = nil
		}
		return false
	}
	at := m.at
	quit, filtered := m.keys.press(k, &at)
	if quit || filtered {
		m.arrange(now)
		return quit
	}
	switch {
	case asking != noPrompt && m.keys.typing == noPrompt && k == "enter":
		return m.entered(asking)
	case asking != noPrompt || m.keys.typing != noPrompt || m.keys.help:
	case k == ":":
		m.keys.ask(commandPrompt, "")
	case k == "a" && m.guideAt < len(m.guide) && m.guide[m.guideAt].Question:
		m.keys.ask(answerPrompt, "")
	case k == "n":
		m.turn(m.guideAt + 1)
	case k == "b":
		m.turn(m.guideAt - 1)
	case k == "p", k == " ":
		m.pause(now)
	case m.lesson:
		m.reading.top = m.reading.to(k, m.reading.top)
	case m.page != nil:
		m.page.key(k)
	case at != m.at:
		m.at, m.cursor = at, keyOf(m.shown[at].status)
	case k == "enter":
		m.open()
	case k == "s":
		m.keys.order = (m.keys.order + 1) % orders
		m.arrange(m.received)
	case k == "e":
		m.endpoints = !m.endpoints
	}
	return false
}

// turn shows another step of the guide.
func (m *Model) turn(to int) {
	if to = max(min(to, len(m.guide)-1), 0); to != m.guideAt {
		m.guideAt, m.reading = to, scroll{}
	}
}

// current is the service that keys are about: under the cursor, or whose page is open.
func (m *Model) current() *service {
	if m.page != nil {
		return m.services[m.page.of]
	}
	if m.at < len(m.shown) {
		return m.shown[m.at]
	}
	return nil
}

// pinWords are what a command can name.
var pinWords = []string{"userspace", "kernel", "auto"}

// entered takes in what was typed at a prompt.
func (m *Model) entered(at prompt) (quit bool) {
	input := strings.TrimSpace(m.keys.input)
	switch words := strings.Fields(input); {
	case at == filterPrompt || len(words) == 0:
	case at == answerPrompt:
		m.answer(m.guideAt, input)
	case words[0] == "q" || words[0] == "quit":
		return true
	case words[0] == "pin" && len(words) == 2 && slices.Contains(pinWords, words[1]):
		if s := m.current(); s != nil && m.pin != nil {
			m.said = "pinning " + s.name + " to " + words[1]
			m.pin(*s.status, words[1])
		}
	default:
		m.said = "there is no command " + input + "; there are pin userspace, pin kernel, pin auto, quit"
	}
	return false
}

// Say shows a message at the bottom until the next key.
func (m *Model) Say(message string) { m.said = message }

// press takes in a key that means the same on all screens: it leaves, filters, helps, or
// moves from the row at.
func (k *keys) press(key string, at *int) (quit, filtered bool) {
	if key == "ctrl+c" {
		return true, false
	}
	if k.typing != noPrompt {
		return false, k.typed(key)
	}
	helped := k.help
	switch key {
	case "q", "Q":
		k.help = false
		return !helped, false
	case "esc":
		k.help = false
		return false, !helped && k.setFilter("")
	case "?", "h":
		k.help = !k.help
	case "/":
		k.ask(filterPrompt, k.filter)
		k.help = false
	default:
		*at = k.to(key, *at)
	}
	return false, false
}

// to returns the row that a key leads to from at.
func (s *scroll) to(key string, at int) int {
	page := max(s.page-1, 1)
	switch key {
	case "up", "k":
		at--
	case "down", "j":
		at++
	case "pgup":
		at -= page
	case "pgdown":
		at += page
	case "home", "g":
		at = 0
	case "end", "G":
		at = s.rows
	}
	return max(min(at, s.rows-1), 0)
}

// from returns the lines from the top, of which page fit.
func (s *scroll) from(lines []line, page int) []line {
	s.rows, s.page = len(lines), max(page, 1)
	s.top = max(min(s.top, s.rows-s.page), 0)
	return lines[s.top:]
}

// ask begins a prompt.
func (k *keys) ask(p prompt, input string) { k.typing, k.input = p, input }

// typed edits what is typed. A filter holds while it is typed; typed returns true when it
// has changed.
func (k *keys) typed(key string) (filtered bool) {
	filter := k.typing == filterPrompt
	switch key {
	case "enter":
		k.typing = noPrompt
	case "esc":
		k.ask(noPrompt, "")
	case "ctrl+u":
		k.input = ""
	case "backspace":
		_, n := utf8.DecodeLastRuneInString(k.input)
		k.input = k.input[:len(k.input)-n]
	default:
		if utf8.RuneCountInString(key) == 1 && len(k.input) < 200 {
			k.input += key
		}
	}
	return filter && k.setFilter(k.input)
}

func (k *keys) setFilter(s string) (changed bool) {
	if changed = s != k.filter; changed {
		k.filter, k.top = s, 0
	}
	return changed
}

// matches reports whether one of the texts, in lower case, has each word of the
// filter.
func (k *keys) matches(texts ...string) bool {
	for word := range strings.FieldsSeq(strings.ToLower(k.filter)) {
		if !slices.ContainsFunc(texts, func(t string) bool { return strings.Contains(t, word) }) {
			return false
		}
	}
	return true
}

// order says how services are sorted.
type order uint8

const (
	byAttention order = iota
	byName
	byRate
	byFailures
	orders // how many there are
)

var orderNames = [orders]string{byAttention: "attention", byName: "name", byRate: "conn/s", byFailures: "failed"}

func (o order) compare(a, b *service) int {
	first := 0
	switch o {
	case byAttention:
		first = cmp.Compare(a.rank, b.rank)
		if first == 0 && a.active != b.active {
			first = 1
			if a.active {
				first = -1
			}
		}
	case byRate:
		first = cmp.Compare(b.rates.connections, a.rates.connections)
	case byFailures:
		first = cmp.Or(cmp.Compare(b.status.Connections.Failed, a.status.Connections.Failed), cmp.Compare(b.status.Connections.Retried, a.status.Connections.Retried))
	}
	return cmp.Or(first, strings.Compare(a.name, b.name), strings.Compare(a.status.Protocol, b.status.Protocol))
}
