package screen

import (
	"cmp"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"kproxy.dev/kproxy/plan"
)

// Theme says what a terminal can show.
type Theme struct {
	Colour  bool
	Unicode bool // else ASCII only
}

// ThemeOf reads the environment: NO_COLOR (https://no-color.org), and the
// character set of the locale, in the order of setlocale(3).
func ThemeOf(getenv func(string) string) Theme {
	locale := strings.ToLower(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	utf8 := strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
	// The font of Linux's own console has no shapes beyond its 256 or 512.
	return Theme{Colour: getenv("NO_COLOR") == "", Unicode: utf8 && getenv("TERM") != "linux"}
}

// glyphs are the shapes of a theme. Each kind of mark has its own.
type glyphs struct {
	up, down, unknown, unused string // of endpoints
	wrong, changing           string // of services
	alive, dead               string
	branch, ellipsis, cursor  string
	done                      string // of a step
	spark                     []rune
	// Of the drawing: an arrow, what moves along it, and where it forks: first, between, last, alone.
	shaft, head, moving rune
	forks               [4]rune
}

var (
	unicodeGlyphs = glyphs{
		up: "●", down: "✗", unknown: "?", unused: "○",
		wrong: "!", changing: "~", alive: "●", dead: "✗",
		branch: "└ ", ellipsis: "…", cursor: "›", done: "✓", spark: []rune(" ▁▂▃▄▅▆▇█"),
		shaft: '─', head: '▶', moving: '●', forks: [4]rune{'┬', '├', '└', '─'},
	}
	asciiGlyphs = glyphs{
		up: "o", down: "x", unknown: "?", unused: "-",
		wrong: "!", changing: "~", alive: "*", dead: "x",
		branch: "- ", ellipsis: ">", cursor: ">", done: "ok", spark: []rune(" ._-=+*#@"),
		shaft: '-', head: '>', moving: 'o', forks: [4]rune{'+', '+', '+', '-'},
	}
)

func (t Theme) glyphs() *glyphs {
	if t.Unicode {
		return &unicodeGlyphs
	}
	return &asciiGlyphs
}

// endpoint is the shape of an endpoint, and how it looks. A healthy endpoint
// that gets no new connections is hollow: it drains, or others go before it.
func (g *glyphs) endpoint(e *plan.EndpointStatus) (look ansi.Style, shape string) {
	switch {
	case e.Health == "down":
		return bad, g.down
	case !e.Usable:
		return dim, g.unused
	case e.Health == "up":
		return good, g.up
	}
	return warn, g.unknown
}

// encode returns what a terminal that can show t gets of l.
func (t Theme) encode(l line) string {
	s := string(l)
	if !t.Colour {
		s = ansi.Strip(s)
	}
	return strings.TrimRight(s, " ")
}

// sparkline draws the newest w values, oldest first, relative to the largest.
func (g *glyphs) sparkline(values []float64, w int) string {
	values = values[max(0, len(values)-w):]
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	out := []rune(strings.Repeat(" ", w-len(values)))
	for _, v := range values {
		step := 0
		if v > 0 {
			step = 1 + int(v/most*float64(len(g.spark)-2)+0.5)
		}
		out = append(out, g.spark[min(step, len(g.spark)-1)])
	}
	return string(out)
}
