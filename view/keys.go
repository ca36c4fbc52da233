package view

import (
	"cmp"
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
		m.typeKey(k, now)
		return false
	}
	switch k {
	case "q", "Q":
		return !m.closeHelp()
	case KeyEscape:
		if !m.closeHelp() && m.keys.filter != "" {
			m.setFilter("", now)
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
		m.scroll(k)
	}
	return false
}

func (m *Model) closeHelp() bool {
	was := m.keys.help
	m.keys.help = false
	return was
}

func (m *Model) scroll(k Key) {
	page := max(m.keys.page-1, 1)
	switch k {
	case KeyUp, "k":
		m.keys.top--
	case KeyDown, "j":
		m.keys.top++
	case KeyPageUp:
		m.keys.top -= page
	case KeyPageDown:
		m.keys.top += page
	case KeyHome, "g":
		m.keys.top = 0
	case KeyEnd, "G":
		m.keys.top = len(m.shown)
	}
	m.keys.top = max(min(m.keys.top, len(m.shown)-1), 0)
}

// typeKey edits the filter, which holds while it is typed.
func (m *Model) typeKey(k Key, now time.Time) {
	switch k {
	case KeyEnter:
		m.keys.typing = false
	case KeyEscape:
		m.keys.typing = false
		m.setFilter("", now)
	case KeyErase:
		m.setFilter("", now)
	case KeyBackspace:
		_, n := utf8.DecodeLastRuneInString(m.keys.filter)
		m.setFilter(m.keys.filter[:len(m.keys.filter)-n], now)
	default:
		if utf8.RuneCountInString(string(k)) == 1 && len(m.keys.filter) < 200 {
			m.setFilter(m.keys.filter+string(k), now)
		}
	}
}

func (m *Model) setFilter(s string, now time.Time) {
	m.keys.filter, m.keys.top = s, 0
	m.arrange(now)
}

// matches reports whether s has every word of the filter, in its name, its
// addresses, its data plane or its state.
func (k *keys) matches(s *service) bool {
	for word := range strings.FieldsSeq(strings.ToLower(k.filter)) {
		if !strings.Contains(s.search, word) && !strings.Contains(string(s.status.DataPlane), word) && !strings.Contains(string(s.status.State), word) {
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
	case byRate:
		first = cmp.Compare(b.rates.connections, a.rates.connections)
	case byFailures:
		first = cmp.Or(cmp.Compare(b.status.Connections.Failed, a.status.Connections.Failed), cmp.Compare(b.status.Connections.Retried, a.status.Connections.Retried))
	}
	return cmp.Or(first, strings.Compare(a.name, b.name), strings.Compare(a.status.Protocol, b.status.Protocol))
}
