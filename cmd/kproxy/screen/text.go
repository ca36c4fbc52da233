package screen

import (
	"strings"
	"unicode"

	"github.com/charmbracelet/x/ansi"
)

// The looks of text where there are colours. The eight basic colours follow the user's
// own theme, so they are readable on a light background too.
var (
	plain   = ansi.NewStyle()
	bold    = ansi.NewStyle(ansi.AttrBold)
	dim     = ansi.NewStyle(ansi.AttrFaint)
	good    = ansi.NewStyle(ansi.AttrGreenForegroundColor)
	bad     = ansi.NewStyle(ansi.AttrBold, ansi.AttrRedForegroundColor)
	warn    = ansi.NewStyle(ansi.AttrYellowForegroundColor)
	accent  = ansi.NewStyle(ansi.AttrCyanForegroundColor)
	inverse = ansi.NewStyle(ansi.AttrReverse)
)

// line is a row of the screen, or a part of one. Its only control characters are those
// that [styled] puts around a text.
type line string

func text(s string) line { return line(clean(s)) }

func styled(look ansi.Style, s string) line {
	if s == "" {
		return ""
	}
	return line(look.Styled(clean(s)))
}

// width is the number of columns that l takes.
func (l line) width() int { return ansi.StringWidth(string(l)) }

// clip cuts l to at most w columns; the last column then shows that something is missing.
func (l line) clip(w int, ellipsis string) line { return line(ansi.Truncate(string(l), w, ellipsis)) }

// pad makes l exactly w columns wide, with the text at the left or the right.
func (l line) pad(w int, right bool, ellipsis string) line {
	l = l.clip(w, ellipsis)
	space := line(strings.Repeat(" ", max(0, w-l.width())))
	if right {
		return space + l
	}
	return l + space
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

// Wrap cleans s and breaks it at spaces into at most most lines of w columns. What doesn't
// fit in them makes the last one too long, for clip to show.
func Wrap[S ~string](s S, w, most int) []S {
	const whole = "\u2011" // for hyphens, after which [ansi.Wrap] breaks too: a command's flag has them
	wrapped := ansi.Wrap(strings.ReplaceAll(strings.TrimSpace(clean(string(s))), "-", whole), w, "")
	var out []S
	for part := range strings.SplitSeq(strings.ReplaceAll(wrapped, whole, "-"), "\n") {
		switch {
		case len(out) == most:
			out[most-1] += S(" " + part)
		case part != "":
			out = append(out, S(part))
		}
	}
	return out
}

// flow joins as many of the items as fit in w columns, from the first.
func flow(items []line, w int) (out line) {
	for _, item := range items {
		if out != "" && item != "" {
			item = "  " + item
		}
		if out != "" && (out+item).width() > w {
			break
		}
		out += item
	}
	return out
}
