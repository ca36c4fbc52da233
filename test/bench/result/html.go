package result

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"kproxy.dev/kproxy/lab/compare/chart"
	"kproxy.dev/kproxy/lab/compare/statistics"
)

//go:embed page.html.tmpl
var pageText string

var pageTemplate = template.Must(chart.Template(template.New("page")).Funcs(template.FuncMap{
	"figure": statistics.Figure,
}).Parse(pageText))

// page is what the template shows.
type page struct {
	About           string
	Notes, Warnings []string
	Targets         []targetOnPage
	Groups          []groupOnPage
}

type targetOnPage struct {
	Work, Figure, Subject, Wanted, Reached, Verdict string
	Missed                                          bool
}

type groupOnPage struct {
	Title string
	Works []workOnPage
}

type workOnPage struct {
	Title   string
	Figures []figureOnPage
}

type figureOnPage struct {
	Case  *Case
	Chart chart.Chart
}

// WriteHTML writes the report as one page that needs nothing else: no network
// and no script.
func (r *Report) WriteHTML(w io.Writer) error {
	p := page{About: strings.ReplaceAll(r.about(), "`", ""), Notes: r.Notes, Warnings: r.Warnings}
	for i := range r.Cases {
		c := &r.Cases[i]
		p.add(c, fmt.Sprintf("chart-%d", i))
		for k := range c.Targets {
			t := &c.Targets[k]
			p.Targets = append(p.Targets, targetOnPage{c.Work, c.Figure, t.Subject, c.Wanted(t), c.Reached(t), strings.Trim(t.verdict(), "*"), t.Measured && !t.Met})
		}
	}
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

// add adds a figure to its work, and that to its group.
func (p *page) add(c *Case, id string) {
	g := slices.IndexFunc(p.Groups, func(g groupOnPage) bool { return g.Title == c.Group })
	if g < 0 {
		g = len(p.Groups)
		p.Groups = append(p.Groups, groupOnPage{Title: c.Group})
	}
	works := &p.Groups[g].Works
	k := slices.IndexFunc(*works, func(w workOnPage) bool { return w.Title == c.Work })
	if k < 0 {
		k = len(*works)
		*works = append(*works, workOnPage{Title: c.Work})
	}
	var bars []chart.Bar
	for i := range c.Subjects {
		s := &c.Subjects[i]
		bars = append(bars, chart.Bar{Class: class(s.Name), Name: s.Name, Spread: s.Spread})
	}
	(*works)[k].Figures = append((*works)[k].Figures, figureOnPage{c, chart.New(id, c.Figure, c.Unit, []chart.Group{{Bars: bars}})})
}

// class tells kproxy, its peers and what limits all of them apart.
func class(subject string) string {
	switch {
	case strings.HasPrefix(subject, "kproxy") || subject == "engine":
		return "own"
	case slices.Contains([]string{"direct", "dnat", "none"}, subject):
		return "limit"
	}
	return "peer"
}
