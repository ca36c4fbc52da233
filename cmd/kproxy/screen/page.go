package screen

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

// page is the screen of one service port.
type page struct {
	scroll
	of   string // which service, a key of Model.services
	tab  tab
	last plan.ServiceStatus // what was known of it, also once it is deleted
	past []endpointCounts   // the newest is of last; rateWindow of them
	Page
}

// Page holds what a service's page has besides its status. Each part is nil until it is known.
type Page struct {
	Connections []plan.ConnectionStatus
	Trace       []string // lines
}

type endpointCounts struct {
	at        time.Time
	endpoints []plan.EndpointStatus
}

type tab uint8

const (
	endpointsTab tab = iota
	connectionsTab
	traceTab
	tabs // how many there are
)

var tabNames = [tabs]string{"endpoints", "connections", "trace"}

// Open returns the service whose page is open, and what of it should be looked up:
// connections always, the trace while it is shown and not yet known.
func (m *Model) Open() (s plan.ServiceStatus, trace, open bool) {
	if m.page == nil || m.lesson {
		return s, false, false
	}
	return m.page.last, m.page.tab == traceTab && m.page.Trace == nil, true
}

// Fill takes in what was looked up of a service, if its page is still open.
func (m *Model) Fill(s *plan.ServiceStatus, p Page) {
	if m.page == nil || m.page.of != keyOf(s) || m.keys.paused {
		return
	}
	if p.Connections != nil {
		SortConnections(p.Connections, "age")
		m.page.Connections = p.Connections
	}
	if p.Trace != nil {
		m.page.Trace = p.Trace
	}
}

// open opens the page of the service under the cursor.
func (m *Model) open() {
	if s := m.current(); s != nil {
		m.cursor = keyOf(s.status)
		m.page = &page{of: m.cursor}
		m.page.update(s)
	}
}

func (p *page) update(s *service) {
	p.last = *s.status
	p.past = last(append(p.past, endpointCounts{s.at, s.status.Endpoints}), rateWindow)
}

// rate returns how many connections an endpoint gets per second.
func (p *page) rate(e *plan.EndpointStatus) float64 {
	first := &p.past[0]
	i := slices.IndexFunc(first.endpoints, func(was plan.EndpointStatus) bool { return was.Address == e.Address })
	seconds := p.past[len(p.past)-1].at.Sub(first.at).Seconds()
	if i < 0 || seconds <= 0 || e.TotalConnections < first.endpoints[i].TotalConnections {
		return 0
	}
	return float64(e.TotalConnections-first.endpoints[i].TotalConnections) / seconds
}

// key takes in a key while p is open.
func (p *page) key(k string) {
	switch k {
	case "tab", "right":
		p.show((p.tab + 1) % tabs)
	case "shift+tab", "left":
		p.show((p.tab + tabs - 1) % tabs)
	case "1", "2", "3":
		p.show(tab(k[0] - '1'))
	case "r":
		p.Trace = nil
	default:
		p.top = p.to(k, p.top)
	}
}

func (p *page) show(t tab) { p.tab, p.scroll = t, scroll{} }

// pageLines are the page without the lines above and below it.
func (m *Model) pageLines(now time.Time, width, room int) []line {
	p, g := m.page, m.theme.glyphs()
	s := m.services[p.of]
	st := &p.last
	title := []line{styled(bold, st.Title()), text(st.Protocol), text(Address(st, "")), styled(accent, string(st.DataPlane)), styled(stateLooks[st.State], string(st.State))}
	if s == nil {
		title = append(title, styled(bad, "deleted"))
	} else if m.gone == "" {
		title = append(title, text(Rate(s.rates.connections)+" conn/s"), text(Count(float64(st.Connections.Active))+" active"))
	}
	var bar line
	for t := range tabs {
		look := plain
		name := fmt.Sprintf(" %d %s ", t+1, tabNames[t])
		if t == p.tab { // by shape as well, for screens without colour
			look, name = inverse, fmt.Sprintf("[%d %s]", t+1, tabNames[t])
		}
		bar += styled(look, name) + " "
	}
	out := []line{flow(title, width), bar}
	var body []line
	switch {
	case p.tab == endpointsTab:
		body = m.endpointsPage(s, now, width)
	case p.tab == traceTab && p.Trace == nil:
		body = []line{styled(dim, "following a packet through the kernel")}
	case p.tab == traceTab:
		for _, l := range p.Trace {
			body = append(body, wrapped(l, width)...)
		}
	case p.Connections == nil:
		body = []line{styled(dim, "asking for its connections")}
	case len(p.Connections) == 0:
		body = []line{"no connection is open now"}
	default:
		body = append([]line{text(ConnectionSummary(p.Connections))}, connectionLines(p.Connections, width >= 130, width, g)...)
	}
	return append(out, p.from(body, room-len(out))...)
}

// endpointsPage is the way of connections as a drawing, and why they go it.
func (m *Model) endpointsPage(s *service, now time.Time, width int) []line {
	p, g := m.page, m.theme.glyphs()
	out := append(m.drawing(now, width), "")
	if s != nil {
		out = append(out, Wrap(line(s.reason()), width, 4)...)
	}
	if st := &p.last; st.Kernel != "" && st.Kernel != plan.None {
		out = append(out, styled(dim, "without kproxy: ")+text(strings.TrimSpace(string(st.Kernel)+" "+st.Scheduler)))
	}
	c := &p.last.Connections
	out = append(out, styled(dim, "since it began: ")+text(fmt.Sprintf("%s connections, %s failed, %s retried, %sB in, %sB out",
		Count(float64(c.Total)), Count(float64(c.Failed)), Count(float64(c.Retried)), Bytes(float64(c.BytesIn)), Bytes(float64(c.BytesOut)))), "")
	for i := range p.last.Endpoints {
		out = append(out, g.endpointLine(&p.last.Endpoints[i], now))
	}
	return out
}

// drawing is the way of connections: clients, the data plane, endpoints with their counters.
// While connections come, a mark moves along the arrows that they take.
func (m *Model) drawing(now time.Time, width int) []line {
	p, g := m.page, m.theme.glyphs()
	st := &p.last
	s := m.services[p.of]
	arrow := func(length int, rate float64) string {
		shaft := []rune(strings.Repeat(string(g.shaft), length))
		if rate > 0 && m.gone == "" {
			shaft[int(now.UnixMilli()/250)%length] = g.moving
		}
		return string(shaft) + string(g.head)
	}
	rate := 0.0
	if s != nil {
		rate = s.rates.connections
	}
	if len(st.Endpoints) == 0 {
		return []line{text("clients " + arrow(6, rate) + " " + Address(st, "") + "  no endpoint")}
	}
	way := text("clients " + arrow(6, rate) + " ")
	if width >= 100 {
		way += text(Address(st, "") + " " + arrow(3, rate) + " ")
	}
	plane := string(st.DataPlane)
	if m.gone != "" && st.Kernel != "" {
		plane = string(st.Kernel)
	}
	way += styled(accent, plane) + " "
	most, widest := 0.0, 0
	for i := range st.Endpoints {
		most, widest = max(most, p.rate(&st.Endpoints[i])), max(widest, len(st.Endpoints[i].Address.String()))
	}
	var out []line
	for i := range st.Endpoints {
		e := &st.Endpoints[i]
		fork := g.forks[1]
		switch {
		case len(st.Endpoints) == 1:
			fork = g.forks[3]
		case i == 0:
			fork = g.forks[0]
		case i == len(st.Endpoints)-1:
			fork = g.forks[2]
		}
		r := p.rate(e)
		l := way + text(string(fork)+arrow(3, r)+" ") + styled(g.endpoint(e)) + text(fmt.Sprintf(" %-*s %6s", widest, e.Address, Count(float64(e.TotalConnections))))
		if m.gone == "" {
			l += text(fmt.Sprintf(" %+5s/s ", Rate(r)))
			if r > 0 {
				l += styled(good, strings.Repeat(string(g.spark[len(g.spark)-1]), max(int(r/most*10), 1)))
			}
		}
		out = append(out, l)
		way = line(strings.Repeat(" ", way.width()))
	}
	return out
}

// wrapped breaks a line that is indented; what follows is as far in as its text.
func wrapped(s string, width int) []line {
	indent := len(s) - len(strings.TrimLeft(s, " "))
	lead, out := line(strings.Repeat(" ", indent)), []line{""}
	for i, part := range Wrap(line(s), max(width-indent-2, 10), 50) {
		if i == 1 && indent > 0 {
			lead += "  "
		}
		out = append(out[:i], lead+part)
	}
	return out
}

// TraceFrom is the client that a page's trace begins at: that of its newest connection that isn't
// the node's own, so that it shows a way that packets took; invalid where there is none.
func (p *Page) TraceFrom() netip.Addr {
	var newest *plan.ConnectionStatus
	for i := range p.Connections {
		if c := &p.Connections[i]; !c.Client.Addr().Unmap().IsLoopback() && (newest == nil || c.AgeSeconds < newest.AgeSeconds) {
			newest = c
		}
	}
	if newest == nil {
		return netip.Addr{}
	}
	return newest.Client.Addr().Unmap()
}
