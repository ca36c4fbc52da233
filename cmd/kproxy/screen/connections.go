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

// ConnectionOrders are the orders that connections can be sorted by.
var ConnectionOrders = []string{"service", "bytes", "age"}

// SortConnections sorts rows by service, then protocol and client; by "bytes",
// those with most first; by "age", the oldest first and then those whose age
// the kernel doesn't tell.
func SortConnections(rows []plan.ConnectionStatus, by string) {
	slices.SortStableFunc(rows, func(a, b plan.ConnectionStatus) int {
		first := 0
		switch by {
		case "bytes":
			first = cmp.Compare(b.BytesIn+b.BytesOut, a.BytesIn+a.BytesOut)
		case "age":
			first = cmp.Compare(b.AgeSeconds, a.AgeSeconds)
		}
		return cmp.Or(first, strings.Compare(a.Service, b.Service), strings.Compare(a.Protocol, b.Protocol), a.Client.Compare(b.Client), a.Address.Compare(b.Address))
	})
}

// ConnectionTable returns a table of rows: a head, a line for each, as wide as
// their contents want. With a width that isn't 0, names of services are cut to
// fit in it. wide adds the address that the client used.
func ConnectionTable(rows []plan.ConnectionStatus, wide bool, width int, t Theme) []string {
	var out []string
	for _, l := range connectionLines(rows, wide, width, t.glyphs()) {
		out = append(out, t.encode(l))
	}
	return out
}

func connectionLines(rows []plan.ConnectionStatus, wide bool, width int, g *glyphs) []line {
	cells := [][]string{{"PROTO", "CLIENT", "SERVICE", "ENDPOINT", "DATA PLANE", "AGE", "IN", "OUT"}}
	if wide {
		cells[0] = slices.Insert(cells[0], 3, "ADDRESS")
	}
	for i := range rows {
		cells = append(cells, connectionCells(&rows[i], wide))
	}
	table := make([]column, len(cells[0]))
	total := len(table) - 1
	for i := range table {
		c := &table[i]
		for _, r := range cells {
			c.width = max(c.width, ansi.StringWidth(r[i]))
		}
		c.right = i >= len(table)-3
		total += c.width
	}
	if name := &table[2]; width > 0 && total > width {
		name.width = max(name.width-(total-width), min(name.width, leastName))
	}
	out := make([]line, len(cells))
	for i, r := range cells {
		look := plain
		if i == 0 {
			look = bold
		}
		out[i] = row(table, g, func(c int) line { return styled(look, r[c]) })
	}
	return out
}

func connectionCells(r *plan.ConnectionStatus, wide bool) []string {
	age := "-" // the kernel doesn't tell
	if r.AgeSeconds > 0 {
		age = Age(time.Duration(r.AgeSeconds * float64(time.Second)))
	}
	cells := []string{r.Protocol, r.Client.String(), r.Service, r.Endpoint.String(), string(r.DataPlane), age, Bytes(float64(r.BytesIn)), Bytes(float64(r.BytesOut))}
	if wide {
		cells = slices.Insert(cells, 3, r.Address.String())
	}
	return cells
}

// ConnectionSummary says how many connections there are in which data planes,
// and what they carried.
func ConnectionSummary(rows []plan.ConnectionStatus) string {
	counts := map[plan.DataPlane]int{}
	var in, out uint64
	for i := range rows {
		counts[rows[i].DataPlane]++
		in += rows[i].BytesIn
		out += rows[i].BytesOut
	}
	var planes []string
	for _, p := range plan.DataPlanes {
		if n := counts[p]; n > 0 {
			planes = append(planes, fmt.Sprintf("%d in %s", n, p))
		}
	}
	switch len(rows) {
	case 0:
		return "no connections"
	case 1:
		return fmt.Sprintf("1 connection, %s; %sB in, %sB out", planes[0], Bytes(float64(in)), Bytes(float64(out)))
	}
	return fmt.Sprintf("%d connections: %s; %sB in, %sB out", len(rows), strings.Join(planes, ", "), Bytes(float64(in)), Bytes(float64(out)))
}

// Connections is a screen of live connections. Start from [NewConnections].
type Connections struct {
	screen
	wide  bool
	by    int // of ConnectionOrders
	all   []plan.ConnectionStatus
	shown []plan.ConnectionStatus // those that pass the filter, in order
}

// NewConnections returns a screen that has seen nothing yet, sorted by one of
// [ConnectionOrders].
func NewConnections(t Theme, wide bool, by string) *Connections {
	return &Connections{screen: screen{theme: t}, wide: wide, by: max(slices.Index(ConnectionOrders, by), 0)}
}

// Update takes in what is alive now.
func (c *Connections) Update(rows []plan.ConnectionStatus, _ time.Time) {
	if !c.keys.paused {
		c.gone, c.all = "", rows
		c.arrange()
	}
}

func (c *Connections) arrange() {
	c.shown = nil
	for i := range c.all {
		r := &c.all[i]
		if c.keys.filter == "" || c.keys.matches(strings.ToLower(strings.Join(append(connectionCells(r, true), r.Protocol), " "))) {
			c.shown = append(c.shown, *r)
		}
	}
	c.keys.rows = len(c.shown)
	SortConnections(c.shown, ConnectionOrders[c.by])
}

// Key takes in a key; it returns true when the user wants to leave.
func (c *Connections) Key(k string, _ time.Time) (quit bool) {
	quit, filtered := c.keys.press(k, &c.keys.top)
	c.keys.help = false // there is none
	if quit || filtered {
		c.arrange()
		return quit
	}
	if c.keys.typing != noPrompt {
		return false
	}
	switch k {
	case "s":
		c.by = (c.by + 1) % len(ConnectionOrders)
		c.arrange()
	case "e", "w":
		c.wide = !c.wide
	case "p", " ":
		c.keys.paused = !c.keys.paused
	}
	return false
}

// Render gives the lines of a screen, at most height of them and none wider
// than width.
func (c *Connections) Render(now time.Time, width, height int) []string {
	if width <= 0 || height <= 0 {
		return nil
	}
	g := c.theme.glyphs()
	lines := []line{styled(bold, ConnectionSummary(c.shown)) + styled(dim, "  "+now.Format("15:04:05"))}
	if c.gone != "" {
		lines = append(lines, paragraph(bad, fmt.Sprintf("%s For %s kproxy hasn't answered: ", g.dead, Age(now.Sub(c.since))), c.gone, width)...)
	}
	room := max(height-len(lines)-2, 0) // a head and a footer
	c.keys.top = max(min(c.keys.top, len(c.shown)-1), 0)
	page := c.shown[c.keys.top:min(len(c.shown), c.keys.top+room)]
	c.keys.page = len(page)
	lines = append(lines, connectionLines(page, c.wide, width, g)...)
	return c.encode(append(fit(lines, height-1), c.footer(len(page), width)), width, height)
}

func (c *Connections) footer(shown, width int) line {
	position := "none"
	if shown > 0 {
		position = fmt.Sprintf("%d-%d of %d", c.keys.top+1, c.keys.top+shown, len(c.shown))
	}
	return c.keys.footer(width, text(position), "/ filter", text("s sort: "+ConnectionOrders[c.by]), "p pause", "w wide", "arrows scroll")
}
