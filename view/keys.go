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

// Key takes in a key; it returns true when the user wants to leave.
func (m *Model) Key(k Key, now time.Time) (quit bool) {
	if k == KeyInterrupt {
		return true
	}
	if m.keys.typing {
		if m.keys.typeKey(k) {
			m.arrange(now)
		}
		return false
	}
	switch k {
	case "q", "Q":
		return !m.closeHelp()
	case KeyEscape:
		if !m.closeHelp() && m.keys.filter != "" {
			m.keys.setFilter("")
			m.arrange(now)
		}
	case "?", "h":
		m.keys.help = !m.keys.help
	case "/":
		m.keys.typing, m.keys.help = true, false
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
	default:
		m.keys.scroll(k, len(m.shown))
	}
	return false
}

func (m *Model) closeHelp() bool {
	was := m.keys.help
	m.keys.help = false
	return was
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
