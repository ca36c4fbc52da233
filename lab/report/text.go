package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

func (r *Report) duration() time.Duration { return time.Duration(r.Seconds) * time.Second }

// WriteTable prints the report for a terminal: a table for each group of cases, with a
// column for each subject, and times as much as the first of them.
func (r *Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "kproxy %s, Linux %s, %s, %s\nMedians (least–greatest), and times as much as the first column in the same round.\n", r.Version, r.Host.Kernel, Count(r.Host.CPUs, "processor"), r.duration())
	for _, g := range r.groups() {
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		var limits, others []string
		for _, c := range g.cases {
			for _, s := range c.Subjects {
				if s.Class == Limit {
					limits = union(limits, s.Name)
				} else {
					others = union(others, s.Name)
				}
			}
		}
		names := append(limits, others...)
		fmt.Fprintf(t, "\n%s\tUNIT\t%s\n", strings.ToUpper(g.Title), strings.ToUpper(strings.Join(names, "\t")))
		for _, c := range g.cases {
			cells := []string{c.Title(), c.Unit}
			for i, name := range names {
				text, s := "–", c.Subject(name)
				if s != nil {
					text = s.String()
				}
				if ratio, _, ok := Ratio(s, c.Subject(names[0])); ok && i > 0 {
					text += "  ×" + Figure(ratio.Median)
				}
				cells = append(cells, text)
			}
			fmt.Fprintln(t, strings.Join(cells, "\t"))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	b.WriteByte('\n')
	r.lists(&b)
	_, err := io.WriteString(w, strings.TrimSuffix(b.String(), "\n"))
	return err
}

func union(list []string, word string) []string {
	if slices.Contains(list, word) {
		return list
	}
	return append(list, word)
}

// lists writes what the figures say, and what makes them doubtful.
func (r *Report) lists(w io.Writer) {
	for _, s := range []struct {
		title string
		lines []string
	}{{"What this tells", r.Findings}, {"What makes it doubtful", r.Warnings}} {
		if len(s.lines) > 0 {
			fmt.Fprintf(w, "%s:\n\n- %s\n\n", s.title, strings.Join(s.lines, "\n- "))
		}
	}
}

// WriteMarkdown writes the report for a reader of text.
func (r *Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n\n", r.Title, r.about())
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "- **%s**: %s\n", n.Title, n.Text)
	}
	b.WriteByte('\n')
	r.lists(&b)
	for _, g := range r.groups() {
		fmt.Fprintf(&b, "## %s\n\n", g.Title)
		for _, c := range g.cases {
			f := newFigure("", c)
			fmt.Fprintf(&b, "### %s (%s, %s is better)\n\n| %s |\n|---|%s\n", c.Title(), c.Unit, c.Better, strings.Join(f.Head, " | "), strings.Repeat("---:|", len(f.Head)-1))
			for _, row := range f.Rows {
				fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			}
			b.WriteByte('\n')
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// group is the cases of one chapter.
type group struct {
	Title, Text string
	cases       []*Case
	Figures     []figure
}

func (r *Report) groups() (out []*group) {
	for i := range r.Cases {
		c := &r.Cases[i]
		if len(out) == 0 || out[len(out)-1].Title != c.Group {
			out = append(out, &group{Title: c.Group})
		}
		g := out[len(out)-1]
		g.cases = append(g.cases, c)
	}
	return out
}

// figure is a case as a table: a row for each subject, with what each of kproxy's
// subjects has in times of it.
type figure struct {
	*Case
	ID    string
	Head  []string
	Rows  [][]string
	Chart chart
}

func newFigure(id string, c *Case) figure {
	f := figure{Case: c, ID: id, Head: []string{"subject", "median", "least", "greatest"}, Chart: newChart(c)}
	failures := false
	var parts []string
	for i := range c.Subjects {
		failures = failures || c.Subjects[i].Failures > 0
		for _, p := range c.Subjects[i].Parts {
			parts = union(parts, p.Name)
		}
	}
	if failures {
		f.Head = append(f.Head, "failures")
	}
	own := c.Own()
	for _, o := range own {
		f.Head = append(f.Head, o.Name+" ÷ it")
	}
	for _, p := range parts {
		f.Head = append(f.Head, "of it "+p)
	}
	for i := range c.Subjects {
		s := &c.Subjects[i]
		row := []string{s.Name, Figure(s.Median), Figure(s.Min), Figure(s.Max)}
		if failures {
			row = append(row, strings.TrimSuffix(Thousands(s.Failures)+": "+s.Error, ": "))
		}
		for _, o := range own {
			text := "–"
			if ratio, _, ok := Ratio(o, s); ok && o != s {
				text = ratio.String()
			}
			row = append(row, text)
		}
		for k := range parts {
			text := "–"
			if k < len(s.Parts) {
				text = Figure(s.Parts[k].Value)
			}
			row = append(row, text)
		}
		f.Rows = append(f.Rows, row)
	}
	return f
}
