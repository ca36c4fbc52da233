package screen

import (
	"fmt"
	"strings"
	"time"
)

// Render gives the lines of a screen, at most height of them and none wider
// than width. It also settles how far the services are scrolled.
func (m *Model) Render(now time.Time, width, height int) []string {
	if width <= 0 || height <= 0 {
		return nil
	}
	if m.keys.paused {
		now = m.paused
	}
	return m.encode(m.compose(now, width, height), width, height)
}

// compose puts header, services, and what is below them one under another. The
// services get what the others leave.
func (m *Model) compose(now time.Time, width, height int) []line {
	lines := m.header(now, width)
	shown, room := len(m.shown), max(height-2, 0)
	switch {
	case m.keys.help:
		lines = append(lines[:1], helpText(len(m.guide) > 0, width)...)
	case m.lesson:
		lines = append(lines[:1], m.lessonLines(now, width, room)...)
	case m.page != nil:
		lines = append(lines[:1], m.pageLines(now, width, room)...)
	default:
		if height < 8 {
			lines = lines[:1] // the most that a tiny screen can spare
		}
		below := m.below(width, height-len(lines)-1)
		room = max(height-len(lines)-len(below)-1, 0)
		var table []line
		table, shown = m.table(now, width, room)
		lines = append(fit(append(lines, table...), len(lines)+room), below...)
	}
	return append(fit(lines, height-1), m.footer(shown, width))
}

// fit makes lines exactly n, so that what follows is at the bottom.
func fit(lines []line, n int) []line {
	n = max(n, 0)
	return append(lines, make([]line, max(n-len(lines), 0))...)[:n]
}

// below returns the lines under the services: the caller's note, something to try, what happened. The first two get at most
// two thirds of the room, or all but five lines if that is more. Events get at most half of the rest, and a line for their title.
func (m *Model) below(width, room int) []line {
	var out []line
	if m.note != nil && room >= 6 {
		out = append(out, text(m.note()))
	}
	if guide := m.guideLines(width); len(guide) > 0 && len(out)+len(guide) <= max(room*2/3, room-5) {
		out = append(out, guide...)
	}
	services := 1 + min(3, len(m.shown)) // with their head; they go before events
	most := min(6, room/4, room/2-len(out)/2, room-len(out)-1-services)
	if len(m.events) == 0 || most < 1 {
		return out
	}
	out = append(out, rule("recent events", width))
	for _, e := range last(m.events, most) {
		l := styled(dim, e.Time.Format("15:04:05")+" ")
		if e.Service != "" {
			l += styled(accent, e.Service+" ")
		}
		out = append(out, l+text(e.Message))
	}
	return out
}

// rule is a title that stands apart.
func rule(title string, width int) line {
	l := styled(bold, title+" ")
	return l + styled(dim, strings.Repeat("-", max(min(width, 200)-l.width(), 0)))
}

func (m *Model) guideLines(width int) []line {
	if len(m.guide) == 0 {
		return nil
	}
	step, state := m.guide[m.guideAt], m.states[m.guideAt]
	next := "n skips, b back"
	if state.Done || state.Said == "" {
		next = "n next, b back"
	}
	if step.Question {
		next = "a answers, " + next
	}
	out := []line{rule(fmt.Sprintf("try in another terminal: %d of %d (%s)", m.guideAt+1, len(m.guide), next), width)}
	out = append(out, styled(bold, step.Title))
	for _, p := range step.Text {
		out = append(out, wrapped(p, width)...)
	}
	for _, c := range step.Commands {
		parts := Wrap(c, max(width-4, 1), 4)
		for i, part := range parts {
			if i < len(parts)-1 {
				part += " \\" // so that it can be copied
			}
			out = append(out, styled(accent, "  "+part))
		}
	}
	if step.Look != "" {
		out = append(out, Wrap(line("Look for: "+step.Look), width, 7)...)
	}
	return append(out, m.stateLines(state, width)...)
}

// stateLines say what a step waits for, or that it is done.
func (m *Model) stateLines(s StepState, width int) []line {
	look, mark := warn, "waiting: "
	switch g := m.theme.glyphs(); {
	case s.Said == "":
		return nil
	case s.Done:
		look, mark = good, g.done+" confirmed: "
	}
	return paragraph(look, mark, s.Said, width)
}

// lessonLines are a lesson: the drawing, what there is to read and to do, and how that goes, which
// stays on the screen however far the rest is scrolled.
func (m *Model) lessonLines(now time.Time, width, room int) []line {
	out := append(m.drawing(now, width), "")
	if m.note != nil {
		out[len(out)-1] = text(m.note())
	}
	state := m.stateLines(m.states[m.guideAt], width)
	body := m.guideLines(width)
	body = body[:len(body)-len(state)]
	out, body = append(out, body[0]), body[1:]
	body = m.reading.from(body, room-len(out)-len(state))
	if page := m.reading.page; len(body) > page {
		body = append(body[:page-1:page-1], styled(dim, "more below: arrows scroll"))
	}
	return append(fit(append(out, body...), room-len(state)), state...)
}

// footer says which keys there are, or how what they did went.
func (m *Model) footer(shown, width int) line {
	switch {
	case m.said != "" && m.keys.typing == noPrompt:
		return text(m.said)
	case m.lesson:
		return m.keys.footer(width, "n next, b back", "a answer", "arrows scroll", "? help")
	case m.page != nil:
		return m.keys.footer(width, "Esc back", "Tab, 1-3 other pages", ": pin", "r trace again", "arrows scroll", "? help")
	}
	position := fmt.Sprintf("%d services", len(m.shown))
	if shown < len(m.shown) {
		position = fmt.Sprintf("%d-%d of %d", m.keys.top+1, m.keys.top+shown, len(m.shown))
	}
	return m.keys.footer(width, text(position), "? help", "Enter opens", "/ filter", ": pin", text("s sort: "+orderNames[m.keys.order]), "p pause", "e endpoints")
}

// footer shows what is typed, or else, between the first of the items and the others, what keeps
// rows from the screen or the screen from changing.
func (k *keys) footer(width int, first line, others ...line) line {
	if k.typing != noPrompt {
		return styled(inverse, string(prompts[k.typing][0])+k.input+"_") + prompts[k.typing][1]
	}
	items := []line{styled(inverse, " q quit "), first}
	if k.paused {
		items = append(items, styled(warn, "PAUSED (p goes on)"))
	}
	if k.filter != "" {
		items = append(items, styled(warn, "filter: "+k.filter))
	}
	return flow(append(items, others...), width)
}

func helpText(guide bool, width int) []line {
	rows := [][2]string{
		{"q, Ctrl-C", "quit"},
		{"arrows, PageUp/Down", "move the cursor, or scroll; Home and End too"},
		{"Enter, Esc", "open the page of a service, with endpoints, connections and trace; and back"},
		{":", "pin the service: pin userspace, pin kernel, pin auto"},
		{"/", "filter by words of a name, an address, a data plane or a state; Esc clears it"},
		{"s", "sort: what needs attention first and then what is busy, by name, by connections per second, by failures"},
		{"p", "pause, and go on"},
		{"e", "show or hide a line for each endpoint"},
		{"Tab, 1, 2, 3; r", "on a page: its parts; trace again"},
		{"?", "this help"},
	}
	if guide {
		rows = append(rows, [2]string{"n, b", "next and previous thing to try; a types an answer"})
	}
	rows = append(rows,
		[2]string{"! and ~", "something is wrong with a service; it changes, or just did"},
		[2]string{"", "endpoints: a shape each (see e for their words), then how many of them may be used"})
	const column = 21
	out := []line{""}
	for _, r := range rows {
		for _, part := range Wrap(line(r[1]), max(width-column, 10), 4) {
			out = append(out, styled(accent, r[0]).pad(column, false, "")+part)
			r[0] = ""
		}
	}
	return out
}
