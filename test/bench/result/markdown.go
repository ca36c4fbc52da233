package result

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// WriteMarkdown writes the report for a reader of text: what was aimed at, then
// every figure.
func (r *Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# What kproxy reaches next to others\n\n%s\n\n", r.about())
	list(&b, "How it was measured", r.Notes)
	list(&b, "What makes it doubtful", r.Warnings)
	r.targets(&b)
	group := ""
	for i := range r.Cases {
		c := &r.Cases[i]
		if c.Group != group {
			group = c.Group
			fmt.Fprintf(&b, "## %s\n\n", group)
		}
		c.markdown(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// about is one paragraph on when and where.
func (r *Report) about() string {
	h := &r.Host
	text := fmt.Sprintf("Measured by `%s` on %s in %s: kproxy %s, Linux %s, %d processors%s, %s GiB of memory, %s.",
		r.Command, r.Started.UTC().Format("2 January 2006, 15:04 UTC"), (time.Duration(r.Seconds) * time.Second).String(),
		r.KProxy, h.Kernel, h.CPUs, inParentheses(h.CPUModel), statistics.Figure(h.MemoryGiB), h.Go)
	for _, p := range h.Peers {
		text += fmt.Sprintf(" %s: %s.", p.Name, p.Version)
	}
	text += fmt.Sprintf(" During runs the hypervisor took %.0f%% of the processors (up to %.0f%%), other programs %.0f%% (up to %.0f%%).",
		100*h.Steal.Median, 100*h.Steal.Max, 100*h.Others.Median, 100*h.Others.Max)
	for _, a := range r.Absent {
		text += fmt.Sprintf(" Not measured here: %s: %s.", a.Subject, a.Reason)
	}
	return text
}

func inParentheses(s string) string {
	if s == "" {
		return ""
	}
	return " (" + s + ")"
}

func list(w io.Writer, title string, lines []string) {
	if len(lines) > 0 {
		fmt.Fprintf(w, "%s:\n\n- %s\n\n", title, strings.Join(lines, "\n- "))
	}
}

func (r *Report) targets(w io.Writer) {
	head := false
	for i := range r.Cases {
		c := &r.Cases[i]
		for _, t := range c.Targets {
			if !head {
				head = true
				fmt.Fprint(w, "## Targets\n\n| work | figure | subject | target | reached | |\n|---|---|---|---|---|---|\n")
			}
			fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s |\n", c.Work, c.Figure, t.Subject, c.Wanted(&t), c.Reached(&t), t.verdict())
		}
	}
	if head {
		fmt.Fprintln(w)
	}
}

// WriteTargets writes a line for each target.
func (r *Report) WriteTargets(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := range r.Cases {
		c := &r.Cases[i]
		for k := range c.Targets {
			g := &c.Targets[k]
			fmt.Fprintf(t, "%s\t%s\t%s\twanted %s\t%s\n", c.Name, g.Subject, c.Reached(g), c.Wanted(g), strings.Trim(g.verdict(), "*"))
		}
	}
	return t.Flush()
}

func (t *Target) verdict() string {
	switch {
	case !t.Measured:
		return "–"
	case t.Met:
		return "met"
	}
	return "**not met**"
}

// markdown writes the figure's table.
func (c *Case) markdown(w io.Writer) {
	fmt.Fprintf(w, "### %s: %s (%s, %s is better)\n\n| subject | median | least | greatest | failures |\n|---|---:|---:|---:|---:|\n", c.Work, c.Figure, c.Unit, c.Better)
	for i := range c.Subjects {
		s := &c.Subjects[i]
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", s.Name, statistics.Figure(s.Median), statistics.Figure(s.Min), statistics.Figure(s.Max), s.Failed())
	}
	fmt.Fprintln(w)
}

// Failed says how many failed, and why the first did.
func (s *Subject) Failed() string {
	switch {
	case s.Error != "":
		return fmt.Sprintf("%s: %s", statistics.Thousands(s.Failures), s.Error)
	case s.Failures > 0:
		return statistics.Thousands(s.Failures)
	}
	return "0"
}
