package screen

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"kproxy.dev/kproxy/plan"
)

// column is one column of the services.
type column struct {
	from  int // the least width of a screen that has it
	title string
	width int // 0: what the others leave
	right bool
	cell  func(s *service) line
}

// leastName is the least width of the column that takes what others leave.
const leastName = 8

// layout chooses the columns for a screen: what matters most is on the
// narrowest, too.
func (m *Model) layout(now time.Time, width int) []column {
	g, current := m.theme.glyphs(), m.current()
	rate := func(v string) line { // unknown while kproxy is gone
		if m.gone != "" {
			return styled(dim, "-")
		}
		return text(v)
	}
	marked := func(s *service, its, others line) line { // shows which service keys are about
		if s == current {
			return its
		}
		return others
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
	all := []column{
		{0, "", 2, false, func(s *service) line { return marked(s, styled(bold, g.cursor), " ") + g.mark(s.rank) }},
		{0, "SERVICE", 0, false, func(s *service) line { return marked(s, styled(inverse, s.name), text(s.name)) }},
		{150, "ADDRESS", 24, false, func(s *service) line { return text(Address(s.status, "")) }},
		{0, "PLANE", at(0, 5, 100, 9), false, func(s *service) line {
			return styled(accent, planeName(s.status.DataPlane, width < 100))
		}},
		{60, "STATE", 14, false, func(s *service) line { return styled(stateLooks[s.status.State], m.state(s, now)) }},
		{0, "ENDP", max(6, dots+6), false, func(s *service) line { return g.endpoints(s, dots) }},
		{0, "CONN/S", 6, true, func(s *service) line { return rate(Rate(s.rates.connections)) }},
		{80, "", spark, false, func(s *service) line { return styled(good, g.sparkline(s.past, spark)) }},
		{70, "ACTIVE", 6, true, func(s *service) line { return text(Count(float64(s.status.Connections.Active))) }},
		{130, "IN B/S", 7, true, func(s *service) line { return rate(Bytes(s.rates.in)) }},
		{130, "OUT B/S", 7, true, func(s *service) line { return rate(Bytes(s.rates.out)) }},
		{90, "FAILED", 6, true, func(s *service) line {
			return m.failures(s.status.Connections.Failed, s.rates.failed, bad)
		}},
		{100, "RETRIED", 7, true, func(s *service) line {
			return m.failures(s.status.Connections.Retried, s.rates.retried, warn)
		}},
		{220, "REASON", reason, false, func(s *service) line { return text(s.reason()) }},
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
		out = append(out, c)
	}
	out[name].width = max(left, 1)
	return out
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
	g, columns := m.theme.glyphs(), m.layout(now, width)
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
	visible := m.shown[m.keys.top:min(m.keys.top+room, len(m.shown))]
	blocks, spare := make([][]line, len(visible)), room-1
	for i, s := range visible {
		blocks[i] = m.block(s, columns, width)
		spare -= len(blocks[i])
	}
	for i, s := range visible {
		if len(lines) >= room {
			break
		}
		lines = append(lines, blocks[i]...)
		shown++
		if m.endpoints {
			most := len(s.status.Endpoints)
			if spare >= 0 { // all services fit: endpoints get what they leave
				most = min(most, spare)
			}
			lines = append(lines, m.endpointLines(s, most, now)...)
			spare -= most
		}
	}
	m.keys.page = shown
	return lines, shown
}

// endpointLines are up to most lines for the endpoints of s; the last one counts
// those that have none.
func (m *Model) endpointLines(s *service, most int, now time.Time) []line {
	g, list := m.theme.glyphs(), s.status.Endpoints
	var out []line
	for i := range list[:min(len(list), most)] {
		if left := len(list) - i; i == most-1 && left > 1 {
			return append(out, styled(dim, fmt.Sprintf("    %d more endpoints", left)))
		}
		out = append(out, g.endpointLine(&list[i], now))
	}
	return out
}

// block is the lines of a service without those of its endpoints.
func (m *Model) block(s *service, columns []column, width int) []line {
	g := m.theme.glyphs()
	out := []line{row(columns, g, func(c int) line { return columns[c].cell(s) })}
	if s.rank != fine && columns[len(columns)-1].title != "REASON" {
		for i, part := range Wrap(line(s.reason()), max(width-4, 1), 2) {
			lead := line("    ")
			if i == 0 {
				lead = styled(dim, "  "+g.branch)
			}
			out = append(out, lead+part)
		}
	}
	return out
}

// row is a line of cells, each as wide as its column.
func row(columns []column, g *glyphs, cell func(column int) line) line {
	var out line
	for i, c := range columns {
		if i > 0 {
			out += " "
		}
		out += cell(i).pad(c.width, c.right, g.ellipsis)
	}
	return out
}

func (g *glyphs) mark(r rank) line {
	return [...]line{wrong: styled(bad, g.wrong), changing: styled(warn, g.changing), fine: " "}[r]
}

// stateLooks map states that aren't plain to their looks.
var stateLooks = map[plan.State]ansi.Style{plan.StateRejecting: bad, plan.StateQualifying: warn, plan.StateRecalled: warn, plan.StateOffloaded: good}

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
			out += styled(g.endpoint(&list[i]))
		}
		out += text(strings.Repeat(" ", dots-len(list)+1))
	}
	look := plain
	if s.status.UsableEndpoints() < len(s.status.Endpoints) || len(s.status.Endpoints) == 0 {
		look = warn
	}
	return out + styled(look, fmt.Sprintf("%d/%d", s.status.UsableEndpoints(), len(s.status.Endpoints)))
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
	look, shape := g.endpoint(e)
	health := e.Health
	if !e.Since.IsZero() {
		health += " " + Age(now.Sub(e.Since))
	}
	l := "    " + styled(look, shape) + text(" "+e.Address.String()) + styled(look, "  "+health)
	if !e.Usable {
		l += styled(warn, "  not used")
	}
	if e.Terminating {
		l += styled(warn, "  terminating")
	}
	l += text(fmt.Sprintf("  %s active, %s in all", Count(float64(e.ActiveConnections)), Count(float64(e.TotalConnections))))
	if e.Failures > 0 {
		l += styled(warn, fmt.Sprintf(", %s failed", Count(float64(e.Failures))))
	}
	if e.Weight != 1 {
		l += text(fmt.Sprintf("  weight %d", e.Weight))
	}
	if e.LastError != "" && e.Health == "down" {
		l += text("  " + e.LastError)
	}
	return l
}

// failures is a total, marked while it grows.
func (m *Model) failures(total uint64, rate float64, look ansi.Style) line {
	l := text(Count(float64(total)))
	if rate > 0 && m.gone == "" {
		l = styled(look, "+"+Count(float64(total)))
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
