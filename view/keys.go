package view

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Key is a key that was pressed: a character, or one of the names below.
type Key string

// Keys without a character of their own.
const (
	KeyUp        Key = "up"
	KeyDown      Key = "down"
	KeyPageUp    Key = "page up"
	KeyPageDown  Key = "page down"
	KeyHome      Key = "home"
	KeyEnd       Key = "end"
	KeyEnter     Key = "enter"
	KeyEscape    Key = "escape"
	KeyBackspace Key = "backspace"
	KeyInterrupt Key = "ctrl-c"
	KeyErase     Key = "ctrl-u"
)

// keys is what keys have changed.
type keys struct {
	filter string
	typing bool // keys go into the filter
	order  order
	paused bool
	help   bool
	top    int // services above the screen
	page   int // services on the screen, as last drawn
}

// screen is what all screens have.
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
	quit, filtered := m.keys.press(k, len(m.shown))
	if quit || filtered {
		m.arrange(now)
		return quit
	}
	if m.keys.typing {
		return false
	}
	switch k {
	case "s":
		m.keys.order = (m.keys.order + 1) % orders
		m.arrange(m.received)
	case "e":
		m.endpoints = !m.endpoints
	case "p", " ":
		m.pause(now)
	case "n":
		m.guideAt = min(m.guideAt+1, max(len(m.guide)-1, 0))
	case "b":
		m.guideAt = max(m.guideAt-1, 0)
	}
	return false
}

// press takes in a key that means the same on all screens, of which n rows can be
// scrolled: it leaves, filters, helps or scrolls.
func (k *keys) press(key Key, n int) (quit, filtered bool) {
	if key == KeyInterrupt {
		return true, false
	}
	if k.typing {
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
		k.typing, k.help = true, false
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

// typeKey edits the filter, which holds while it is typed; it returns true when
// that has changed.
func (k *keys) typeKey(key Key) (changed bool) {
	was := k.filter
	switch key {
	case KeyEnter:
		k.typing = false
	case KeyEscape:
		k.typing = false
		k.setFilter("")
	case KeyErase:
		k.setFilter("")
	case KeyBackspace:
		_, n := utf8.DecodeLastRuneInString(was)
		k.setFilter(was[:len(was)-n])
	default:
		if utf8.RuneCountInString(string(key)) == 1 && len(was) < 200 {
			k.setFilter(was + string(key))
		}
	}
	return k.filter != was
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

// order is how services are sorted.
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
