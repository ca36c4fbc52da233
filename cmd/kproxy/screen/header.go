package screen

import (
	"fmt"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"kproxy.dev/kproxy/plan"
)

// header returns the lines on kproxy as a whole: the program, what is wrong with it, how services fare, what it carries.
func (m *Model) header(now time.Time, width int) []line {
	g := m.theme.glyphs()
	if m.received.IsZero() {
		if m.gone == "" {
			return []line{styled(bold, "kproxy") + " is asked for its status"}
		}
		return paragraph(bad, g.dead+" kproxy doesn't answer: ", m.gone, width)
	}
	st := &m.status
	who := styled(bold, "kproxy "+st.Version) + text(" on "+st.Node)
	alive := styled(good, g.alive+" alive")
	if !st.Alive {
		alive = styled(bad, g.dead+" "+st.Health())
	} else if len(st.Exhausted) > 0 {
		alive = styled(bad, g.wrong+" "+st.Health())
	}
	if m.gone != "" {
		alive = styled(bad, g.dead+" GONE")
	}
	out := []line{flow([]line{
		who, alive, text("mode " + string(st.Mode)), text("up " + Age(time.Duration(st.UptimeSeconds)*time.Second)),
		styled(dim, now.Format("15:04:05")),
	}, width)}
	if m.gone != "" {
		out = append(out, paragraph(bad, fmt.Sprintf("For %s it hasn't answered; this is what it last said. ", Age(now.Sub(m.since))), m.gone, width)...)
	} else if !st.Alive {
		out = append(out, text(Unserved(st)))
	}
	if st.Sync.LastError == "" && st.Sync.LastSuccess.IsZero() {
		out = append(out, styled(warn, "no sync yet"))
	}
	for _, r := range Remarks(st) {
		first, _, _ := strings.Cut(r.Text, "\n")
		out = append(out, styled(bad, r.Label)+text(first))
	}
	return append(out[:min(len(out), 6)], m.sums(width)...)
}

// Unserved says what becomes of new connections while a kproxy's heartbeat has stopped.
func Unserved(st *plan.Status) string {
	if st.Mode == plan.ModeUserspace {
		return "new connections are refused: mode userspace has no fallback rules"
	}
	return "new connections go to the fallback rules"
}

// Remark is something to know of a running kproxy, behind what it is about.
type Remark struct{ Label, Text string }

// Remarks lists what keeps a kproxy from doing what it should, besides what is wrong with single services.
func Remarks(st *plan.Status) (out []Remark) {
	if st.Alive && st.NotReady != "" {
		out = append(out, Remark{"not ready: ", st.NotReady})
	}
	if st.Drain != nil {
		out = append(out, Remark{"drained ", strings.TrimPrefix(DrainTitle(st.Drain), "drained ") + " (kproxy drain --undo ends it)"})
	}
	if st.Sync.LastError != "" {
		out = append(out, Remark{"last sync failed: ", st.Sync.LastError})
	}
	for _, warning := range st.Warnings {
		out = append(out, Remark{"warning: ", warning})
	}
	for _, s := range st.Sources {
		if s.Error != "" {
			out = append(out, Remark{"source " + s.Name + ": ", s.Error})
		}
	}
	return out
}

// DrainTitle is a drain in one line.
func DrainTitle(d *plan.Drain) string {
	out := fmt.Sprintf("drained since %s: userspace has %d TCP connections left", d.Since.Local().Format(time.DateTime), d.Left)
	if len(d.Kept) > 0 {
		out += fmt.Sprintf(", and goes on to serve %d service ports that the kernel can't, such as %s", len(d.Kept), d.Kept[0])
	}
	return out
}

// paragraph is a marked start and the rest of a message, in up to three lines.
func paragraph(look ansi.Style, start, rest string, width int) []line {
	out := Wrap(line(start+rest), width, 3)
	if first, ok := strings.CutPrefix(string(out[0]), start); ok {
		out[0] = styled(look, start) + line(first)
	}
	return out
}

// conditionLooks map conditions that aren't plain to their looks.
var conditionLooks = map[plan.Condition]ansi.Style{plan.Unanswered: bad, plan.Failing: bad, plan.PartlyDown: warn, plan.Troubled: warn, plan.Fine: good}

// sums says how all services fare and what they carry, also those that a filter hides.
func (m *Model) sums(width int) []line {
	counts, planes := map[plan.Condition]int{}, map[plan.DataPlane]int{}
	var sum rates
	var all plan.Connections
	for _, s := range m.services {
		counts[s.status.Condition(s.rates.failed > 0)]++
		planes[s.status.DataPlane]++
		sum.connections += s.rates.connections
		sum.in += s.rates.in
		sum.out += s.rates.out
		all.Active += s.status.Connections.Active
		all.Failed += s.status.Connections.Failed
		all.Retried += s.status.Connections.Retried
	}
	var verdict, items []line
	tallies := plan.Summarize(counts)
	for i, t := range tallies {
		verdict = append(verdict, styled(conditionLooks[t.Condition], t.Text))
		if i < len(tallies)-1 {
			verdict[i] += ","
		}
	}
	for _, p := range plan.DataPlanes {
		if n := planes[p]; n > 0 {
			items = append(items, styled(accent, string(p))+text(fmt.Sprintf(" %d", n)))
		}
	}
	errors := plain
	if all.Failed > 0 {
		errors = warn
	}
	live := m.gone == ""
	if live {
		items = append(items, text(Rate(sum.connections)+" conn/s"))
	}
	items = append(items, text(Count(float64(all.Active))+" active"),
		styled(errors, Count(float64(all.Failed))+" failed"), text(Count(float64(all.Retried))+" retried"))
	if live {
		items = append(items, text("in "+Bytes(sum.in)+"B/s"), text("out "+Bytes(sum.out)+"B/s"))
	}
	return []line{flow(verdict, width), flow(items, width)}
}
