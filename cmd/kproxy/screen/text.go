package screen

import (
	"strings"
	"unicode"

	"github.com/charmbracelet/x/ansi"
)

// style says how a piece of text looks where there are colours.
type style uint8

const (
	plain style = iota
	bold
	dim
	good
	bad
	warn
	accent
	inverse
)

// sgr are the parameters of SGR (ECMA-48, 8.3.117). The eight basic colours
// follow the user's own theme, so they are readable on a light background too.
var sgr = [...]string{bold: "1", dim: "2", good: "32", bad: "1;31", warn: "33", accent: "36", inverse: "7"}

// span is a piece of text in one style, without control characters.
type span struct {
	text  string
	style style
}

// line holds what fits in a row of the screen once it is clipped.
type line []span

func text(s string) line             { return line{{clean(s), plain}} }
func styled(st style, s string) line { return line{{clean(s), st}} }

func (l line) with(st style, s string) line { return append(l, span{clean(s), st}) }

// width is the number of columns that l takes.
func (l line) width() int {
	n := 0
	for _, s := range l {
		n += columns(s.text)
	}
	return n
}

// clip cuts l to at most w columns; the last column then shows that something
// is missing.
func (l line) clip(w int, ellipsis string) line {
	if l.width() <= w {
		return l
	}
	var out line
	left := w - columns(ellipsis)
	if left < 0 {
		return nil
	}
	for _, s := range l {
		kept := prefix(s.text, left)
		left -= columns(kept)
		out = append(out, span{kept, s.style})
		if kept != s.text {
			break
		}
	}
	return append(out, span{ellipsis, dim})
}

// pad makes l exactly w columns wide, with the text at the left or the right.
func (l line) pad(w int, right bool, ellipsis string) line {
	l = l.clip(w, ellipsis)
	space := span{strings.Repeat(" ", max(0, w-l.width())), plain}
	if right {
		return append(line{space}, l...)
	}
	return append(l[:len(l):len(l)], space)
}

// encode is l as the terminal gets it.
func (l line) encode(colour bool) string {
	var b strings.Builder
	for _, s := range l {
		if s.text == "" {
			continue
		}
		if !colour || s.style == plain {
			b.WriteString(s.text)
			continue
		}
		b.WriteString("\x1b[" + sgr[s.style] + "m" + s.text + "\x1b[m")
	}
	return strings.TrimRight(b.String(), " ")
}

// clean replaces what would move the cursor or change the terminal: names and
// messages come from files and other programs.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar:
			return '?'
		}
		return r
	}, s)
}

// columns returns how many columns s takes on a terminal: two for wide characters
// (Unicode Standard Annex 11), none for those that combine with the one before.
func columns(s string) int { return ansi.StringWidth(s) }

// prefix is the longest start of s that takes at most w columns.
func prefix(s string, w int) string { return ansi.Truncate(s, w, "") }

// Wrap breaks s at spaces into at most most lines of w columns. What doesn't
// fit in them makes the last one too long, for clip to show.
func Wrap(s string, w, most int) []string {
	var out []string
	for s = strings.TrimSpace(clean(s)); s != ""; {
		if columns(s) <= w || len(out) == most-1 {
			return append(out, s)
		}
		head := prefix(s, w)
		if i := strings.LastIndexByte(head, ' '); i > w/3 && s[len(head)] != ' ' {
			head = head[:i]
		}
		if head == "" {
			return append(out, s)
		}
		out = append(out, strings.TrimRight(head, " "))
		s = strings.TrimLeft(s[len(head):], " ")
	}
	return out
}

// flow joins as many of the items as fit in w columns, from the first.
func flow(items []line, w int) line {
	var out line
	for _, item := range items {
		if item.width() == 0 {
			continue
		}
		if len(out) == 0 {
			out = append(out, item...)
			continue
		}
		if out.width()+2+item.width() > w {
			break
		}
		out = append(append(out, span{"  ", plain}), item...)
	}
	return out
}
