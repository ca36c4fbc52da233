package compare

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// WriteTable prints the report for a terminal.
func (r *Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "kproxy %s, Linux %s, %s, iptables %s; %s, %s\n", r.Version, r.Host.Kernel, r.cpus(), r.iptables(), count(r.Repeat, "round"), (time.Duration(r.Seconds) * time.Second).String())
	fmt.Fprintf(&b, "Medians (least–greatest), and times as much as directly in the same round.\n\n")
	services := -1
	var t *tabwriter.Writer
	flush := func() error {
		if t == nil {
			return nil
		}
		err := t.Flush()
		b.WriteByte('\n')
		return err
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Services != services {
			if err := flush(); err != nil {
				return err
			}
			services = row.Services
			t = tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
			r.tableHead(t, services)
		}
		r.tableRow(t, row)
	}
	if err := flush(); err != nil {
		return err
	}
	for _, s := range []struct {
		title string
		lines []string
	}{{"What this tells", r.Findings}, {"What makes it doubtful", r.Warnings}} {
		if len(s.lines) > 0 {
			fmt.Fprintf(&b, "%s:\n- %s\n\n", s.title, strings.Join(s.lines, "\n- "))
		}
	}
	_, err := io.WriteString(w, strings.TrimSuffix(b.String(), "\n"))
	return err
}

func (r *Report) tableHead(t io.Writer, services int) {
	title := "load"
	if services > 0 {
		title = fmt.Sprintf("first packets among %s", count(services, "service"))
	}
	cells := []string{strings.ToUpper(title), "UNIT"}
	for _, p := range r.measured() {
		cells = append(cells, strings.ToUpper(p.Name()))
	}
	fmt.Fprintln(t, strings.Join(cells, "\t"))
}

func (r *Report) tableRow(t io.Writer, row *Row) {
	cells := []string{row.Title, row.Unit}
	for _, p := range r.measured() {
		text := "–"
		if c := row.Cell(p); c != nil {
			text = c.String()
			if c.Ratio != nil {
				text += fmt.Sprintf("  ×%s", statistics.Figure(c.Ratio.Median))
			}
		}
		cells = append(cells, text)
	}
	fmt.Fprintln(t, strings.Join(cells, "\t"))
}

func (r *Report) cpus() string {
	text := count(r.Host.CPUs, "processor")
	if r.Host.CPUModel != "" {
		text += " (" + r.Host.CPUModel + ")"
	}
	return text
}

func (r *Report) iptables() string {
	if r.Host.IPTables == "" {
		return "unknown"
	}
	return r.Host.IPTables
}
