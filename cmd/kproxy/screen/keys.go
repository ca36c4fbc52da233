package screen

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Key is a key that was pressed: a character, or one of the names below, which are
// Bubble Tea's.
type Key string

// Keys without a character of their own.
const (
	KeyUp        Key = "up"
	KeyDown      Key = "down"
	KeyPageUp    Key = "pgup"
	KeyPageDown  Key = "pgdown"
	KeyHome      Key = "home"
	KeyEnd       Key = "end"
	KeyEnter     Key = "enter"
	KeyEscape    Key = "esc"
	KeyBackspace Key = "backspace"
	KeyInterrupt Key = "ctrl+c"
	KeyErase     Key = "ctrl+u"
	KeyTab       Key = "tab"
	KeyBackTab   Key = "shift+tab"
)

// keys holds what keys have changed.
type keys struct {
	filter string
	typing prompt // where keys go
	input  string // what is typed but into the filter
	order  order
	paused bool
	help   bool
	top    int // rows above the screen
	page   int // rows on the screen, as last drawn
	rows   int // how many there are, as last drawn
}

// prompt says what a line at the bottom asks for.
type prompt uint8

const (
	noPrompt prompt = iota
	filterPrompt
	commandPrompt
	answerPrompt
)

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
		out = append(out, l.clip(width, s.theme.glyphs().ellipsis).encode(s.theme.Colour))
	}
	return out
}

// Key takes in a key; it returns true when the user wants to leave.
func (m *Model) Key(k Key, now time.Time) (quit bool) {
	m.said = ""
	asking, onPage := m.keys.typing, m.page != nil && m.keys.typing == noPrompt && !m.keys.help
	if onPage && (k == KeyEscape || k == "/") {
		if k == KeyEscape && !m.lesson {
			m.page = nil
		}
		return false
	}
	top := m.keys.top // scrolled by the cursor
	m.keys.top = m.at
	quit, filtered := m.keys.press(k, len(m.shown))
	at := m.keys.top
	m.keys.top = top
	if quit || filtered {
		m.arrange(now)
		return quit
	}
	switch {
	case asking != noPrompt && m.keys.typing == noPrompt && k == KeyEnter:
		return m.entered(asking)
	case asking != noPrompt || m.keys.typing != noPrompt || m.keys.help:
		return false
	}
	switch k {
	case ":":
		m.keys.ask(commandPrompt)
		return false
	case "a":
		if m.guideAt < len(m.guide) && m.guide[m.guideAt].Question {
			m.keys.ask(answerPrompt)
		}
		return false
	case "n":
		m.turn(m.guideAt + 1)
		return false
	case "b":
		m.turn(m.guideAt - 1)
		return false
	case "p", " ":
		m.pause(now)
		return false
	}
	switch {
	case m.lesson:
		m.reading.scroll(k, m.reading.rows)
		return false
	case m.page != nil:
		m.pageKey(k)
		return false
	}
	if at != m.at {
		m.move(at)
	}
	switch k {
	case KeyEnter:
		m.open()
	case "s":
		m.keys.order = (m.keys.order + 1) % orders
		m.arrange(m.received)
	case "e":
		m.endpoints = !m.endpoints
	}
	return false
}

// turn shows another step of the guide.
func (m *Model) turn(to int) {
	if to = max(min(to, len(m.guide)-1), 0); to != m.guideAt {
		m.guideAt, m.reading = to, keys{}
	}
}

// move puts the cursor on a row.
func (m *Model) move(to int) {
	m.at = max(min(to, len(m.shown)-1), 0)
	if s := m.current(); s != nil {
		m.cursor = keyOf(s.status)
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

// press takes in a key that means the same on all screens, of which n rows can be
// scrolled: it leaves, filters, helps or scrolls.
func (k *keys) press(key Key, n int) (quit, filtered bool) {
	if key == KeyInterrupt {
		return true, false
	}
	if k.typing != noPrompt {
		return false, k.typeKey(key)
	}
	helped := k.help
	switch key {
	case "q", "Q":
		k.help = false
		return !helped, false
	case KeyEscape:
		k.help = false
		if !helped && k.filter != "" {
			k.setFilter("")
			return false, true
		}
	case "?", "h":
		k.help = !k.help
	case "/":
		k.typing, k.help = filterPrompt, false
	default:
		k.scroll(key, n)
	}
	return false, false
}

// scroll moves the screen over n rows.
func (k *keys) scroll(key Key, n int) {
	page := max(k.page-1, 1)
	switch key {
	case KeyUp, "k":
		k.top--
	case KeyDown, "j":
		k.top++
	case KeyPageUp:
		k.top -= page
	case KeyPageDown:
		k.top += page
	case KeyHome, "g":
		k.top = 0
	case KeyEnd, "G":
		k.top = n
	}
	k.top = max(min(k.top, n-1), 0)
}

// ask begins a prompt with nothing typed.
func (k *keys) ask(p prompt) { k.typing, k.input = p, "" }

// typeKey edits what is typed. A filter holds while it is typed; typeKey returns true when
// it has changed.
func (k *keys) typeKey(key Key) (changed bool) {
	filter, was := k.typing == filterPrompt, k.input
	if filter {
		was = k.filter
	}
	now := was
	switch key {
	case KeyEnter:
		k.typing = noPrompt
	case KeyEscape:
		k.typing, now = noPrompt, ""
	case KeyErase:
		now = ""
	case KeyBackspace:
		_, n := utf8.DecodeLastRuneInString(was)
		now = was[:len(was)-n]
	default:
		if utf8.RuneCountInString(string(key)) == 1 && len(was) < 200 {
			now = was + string(key)
		}
	}
	if !filter {
		k.input = now
	} else if now != was {
		k.setFilter(now)
		return true
	}
	return false
}

func (k *keys) setFilter(s string) { k.filter, k.top = s, 0 }

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
