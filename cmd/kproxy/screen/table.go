package screen

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

// column is one column of the services.
type column struct {
	title string
	width int // 0: what the others leave
	right bool
	cell  func(s *service, now time.Time) line
}

// leastName is the least width of the column that takes what others leave.
const leastName = 8

// layout chooses the columns for a screen: what matters most is on the
// narrowest, too.
func (m *Model) layout(width int) []column {
	g := m.theme.glyphs()
	rate := func(v string) line { // unknown while kproxy is gone
		if m.gone != "" {
			return styled(dim, "-")
		}
		return text(v)
	}
	at := func(steps ...int) int { // the value of the largest step that the screen reaches
		v := 0
		for i := 0; i+1 < len(steps); i += 2 {
			if width >= steps[i] {
				v = steps[i+1]
			}
		}
		return v
	}
	dots, spark, reason := at(0, 0, 60, 4, 120, 8), at(80, 8, 110, 12, 120, 16, 200, 30), max(width-180, 0)
	all := []struct {
		from int
		column
	}{
		{0, column{"", 2, false, func(s *service, _ time.Time) line { return append(m.cursorMark(s), g.mark(s.rank)...) }}},
		{0, column{"SERVICE", 0, false, func(s *service, _ time.Time) line { return styled(m.look(s), s.name) }}},
		{150, column{"ADDRESS", 24, false, func(s *service, _ time.Time) line { return text(Address(s.status, "")) }}},
		{0, column{"PLANE", at(0, 5, 100, 9), false, func(s *service, _ time.Time) line {
			return styled(accent, planeName(s.status.DataPlane, width < 100))
		}}},
		{60, column{"STATE", 14, false, func(s *service, now time.Time) line { return styled(stateStyle(s.status.State), m.state(s, now)) }}},
		{0, column{"ENDP", max(6, dots+6), false, func(s *service, _ time.Time) line { return g.endpoints(s, dots) }}},
		{0, column{"CONN/S", 6, true, func(s *service, _ time.Time) line { return rate(Rate(s.rates.connections)) }}},
		{80, column{"", spark, false, func(s *service, _ time.Time) line { return styled(good, g.sparkline(s.past, spark)) }}},
		{70, column{"ACTIVE", 6, true, func(s *service, _ time.Time) line { return text(Count(float64(s.status.Connections.Active))) }}},
		{130, column{"IN B/S", 7, true, func(s *service, _ time.Time) line { return rate(Bytes(s.rates.in)) }}},
		{130, column{"OUT B/S", 7, true, func(s *service, _ time.Time) line { return rate(Bytes(s.rates.out)) }}},
		{90, column{"FAILED", 6, true, func(s *service, _ time.Time) line {
			return m.failures(s.status.Connections.Failed, s.rates.failed, bad)
		}}},
		{100, column{"RETRIED", 7, true, func(s *service, _ time.Time) line {
			return m.failures(s.status.Connections.Retried, s.rates.retried, warn)
		}}},
		{220, column{"REASON", reason, false, func(s *service, _ time.Time) line { return text(s.reason()) }}},
	}
	var out []column
	name, left := 0, width+1
	for _, c := range all {
		if width < c.from || c.from == 0 && c.width > 0 && left-c.width-1 < leastName {
			continue
		}
		if c.width == 0 {
			name = len(out)
		}
		left -= c.width + 1
		out = append(out, c.column)
	}
	out[name].width = max(left, 1)
	return out
}

// cursorMark shows which service keys are about, by shape and by look.
func (m *Model) cursorMark(s *service) line {
	if s == m.current() {
		return styled(bold, m.theme.glyphs().cursor)
	}
	return text(" ")
}

func (m *Model) look(s *service) style {
	if s == m.current() {
		return inverse
	}
	return plain
}

// table draws the services that fit in room lines, the one under the cursor among them; shown is
// how many do.
func (m *Model) table(now time.Time, width, room int) (lines []line, shown int) {
	m.keys.top = min(m.keys.top, m.at)
	for lines, shown = m.tableFrom(now, width, room); shown > 0 && m.keys.top+shown <= m.at; lines, shown = m.tableFrom(now, width, room) {
		m.keys.top += max(m.at-m.keys.top-shown+1, 1)
	}
	return lines, shown
}

func (m *Model) tableFrom(now time.Time, width, room int) (lines []line, shown int) {
	g, columns := m.theme.glyphs(), m.layout(width)
	if room == 0 {
		return nil, 0
	}
	lines = append(lines, row(columns, g, func(c int) line { return styled(bold, columns[c].title) }))
	if len(m.shown) == 0 {
		why := "no service yet"
		if len(m.services) > 0 {
			why = fmt.Sprintf("none of %d services matches the filter", len(m.services))
		}
		return append(lines, styled(dim, why)), 0
	}
	m.keys.top = max(min(m.keys.top, len(m.shown)-1), 0)
	visible := m.shown[m.keys.top:]
	visible = visible[:min(len(visible), room)]
	blocks := make([][]line, len(visible))
	spare := room - 1
	for i, s := range visible {
		blocks[i] = m.block(s, columns, now, width)
		spare -= len(blocks[i])
	}
	for i, s := range visible {
		block := blocks[i]
		if m.endpoints {
			most := len(s.status.Endpoints)
			if spare >= 0 { // all services fit: endpoints get what they leave
				most = min(most, spare)
			}
			block = append(block, m.endpointLines(s, most, now)...)
			spare -= most
		}
		if len(lines) >= room {
			break
		}
		lines = append(lines, block[:min(len(block), room-len(lines))]...)
		shown++
	}
	m.keys.page = shown
	return lines, shown
}

// endpointLines are up to most lines for the endpoints of s; the last one counts
// those that have none.
func (m *Model) endpointLines(s *service, most int, now time.Time) []line {
	g, list := m.theme.glyphs(), s.status.Endpoints
	more := 0
	if len(list) > most {
		more = len(list) - max(most-1, 0)
		list = list[:len(list)-more]
	}
	var out []line
	for i := range list {
		out = append(out, g.endpointLine(&list[i], now))
	}
	if more > 0 && most > 0 {
		out = append(out, styled(dim, fmt.Sprintf("    %d more endpoints", more)))
	}
	return out
}

// block is the lines of a service without those of its endpoints.
func (m *Model) block(s *service, columns []column, now time.Time, width int) []line {
	g := m.theme.glyphs()
	out := []line{row(columns, g, func(c int) line { return columns[c].cell(s, now) })}
	if s.rank != fine && columns[len(columns)-1].title != "REASON" {
		for i, part := range Wrap(s.reason(), max(width-4, 1), 2) {
			lead := "    "
			if i == 0 {
				lead = "  " + g.branch
			}
			out = append(out, styled(dim, lead).with(plain, part))
		}
	}
	return out
}

// row is a line of cells, each as wide as its column.
func row(columns []column, g *glyphs, cell func(column int) line) line {
	var out line
	for i, c := range columns {
		if i > 0 {
			out = append(out, span{" ", plain})
		}
		out = append(out, cell(i).pad(c.width, c.right, g.ellipsis)...)
	}
	return out
}

func (g *glyphs) mark(r rank) line {
	switch r {
	case wrong:
		return styled(bad, g.wrong)
	case changing:
		return styled(warn, g.changing)
	}
	return text(g.fine)
}

func stateStyle(s plan.State) style {
	switch s {
	case plan.StateRejecting:
		return bad
	case plan.StateQualifying, plan.StateRecalled:
		return warn
	case plan.StateOffloaded:
		return good
	}
	return plain
}

// planeName shortens the name of a data plane for narrow screens.
func planeName(p plan.DataPlane, short bool) string {
	if !short {
		return string(p)
	}
	return strings.NewReplacer("space", "", "ables", "bl").Replace(string(p)) // user, iptbl, ipvs
}

// endpoints shows up to dots shapes, those first that need attention, and how
// many may be used.
func (g *glyphs) endpoints(s *service, dots int) line {
	list := s.status.Endpoints
	if dots > 0 && len(list) > dots {
		list = slices.Clone(list)
		slices.SortStableFunc(list, func(a, b plan.EndpointStatus) int { return cmp.Compare(severity(&a), severity(&b)) })
		list = list[:dots]
	}
	var out line
	if dots > 0 {
		for i := range list {
			out = append(out, g.endpoint(&list[i]))
		}
		out = out.with(plain, strings.Repeat(" ", dots-len(list)+1))
	}
	look := plain
	if s.status.UsableEndpoints() < len(s.status.Endpoints) || len(s.status.Endpoints) == 0 {
		look = warn
	}
	return out.with(look, fmt.Sprintf("%d/%d", s.status.UsableEndpoints(), len(s.status.Endpoints)))
}

func severity(e *plan.EndpointStatus) int {
	switch {
	case e.Health == "down":
		return 0
	case !e.Usable:
		return 1
	}
	return 2
}

// endpointLine is a line of its own for an endpoint.
func (g *glyphs) endpointLine(e *plan.EndpointStatus, now time.Time) line {
	shape := g.endpoint(e)
	health := e.Health
	if !e.Since.IsZero() {
		health += " " + Age(now.Sub(e.Since))
	}
	l := line{{"    ", plain}, shape}.with(plain, " "+e.Address.String()).with(shape.style, "  "+health)
	if !e.Usable {
		l = l.with(warn, "  not used")
	}
	if e.Terminating {
		l = l.with(warn, "  terminating")
	}
	l = l.with(plain, fmt.Sprintf("  %s active, %s in all", Count(float64(e.ActiveConnections)), Count(float64(e.TotalConnections))))
	if e.Failures > 0 {
		l = l.with(warn, fmt.Sprintf(", %s failed", Count(float64(e.Failures))))
	}
	if e.Weight != 1 {
		l = l.with(plain, fmt.Sprintf("  weight %d", e.Weight))
	}
	if e.LastError != "" && e.Health == "down" {
		l = l.with(plain, "  "+e.LastError)
	}
	return l
}

// failures is a total, marked while it grows.
func (m *Model) failures(total uint64, rate float64, st style) line {
	l := text(Count(float64(total)))
	if rate > 0 && m.gone == "" {
		l = styled(st, "+"+Count(float64(total)))
	}
	return l
}

// Address is the first address of a service port, followed by suffix, and how many more
// there are.
func Address(s *plan.ServiceStatus, suffix string) string {
	switch {
	case len(s.Addresses) > 1:
		return fmt.Sprintf("%s%s +%d", s.Addresses[0], suffix, len(s.Addresses)-1)
	case len(s.Addresses) == 1:
		return s.Addresses[0].String() + suffix
	case s.NodePort != 0:
		return fmt.Sprintf("*:%d%s", s.NodePort, suffix)
	}
	return "-"
}
