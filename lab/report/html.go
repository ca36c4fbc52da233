package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"
)

//go:embed page.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// WriteHTML writes the report as one page that needs nothing else: no network
// and no script.
func (r *Report) WriteHTML(w io.Writer) error {
	p := struct {
		*Report
		About  string
		Groups []*group
	}{r, strings.ReplaceAll(r.about(), "`", ""), r.groups()}
	notes := slices.Clone(r.Notes)
	for i, g := range p.Groups {
		for k, c := range g.cases {
			g.Figures = append(g.Figures, newFigure(fmt.Sprintf("figure-%d-%d", i, k), c))
		}
		if at := slices.IndexFunc(notes, func(n Note) bool { return n.Title == g.Title }); at >= 0 {
			g.Text = notes[at].Text
			notes = slices.Delete(notes, at, at+1)
		}
	}
	shown := *r
	shown.Notes = notes
	p.Report = &shown
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

// Measures of a chart, in units of its view box, which is as wide as a phone,
// so that its text is as large as the page's there.
const (
	chartWidth = 340
	barHeight  = 38 // with its line of text
)

// chart is bars with their spread, one below the other, ready to be drawn as SVG.
type chart struct {
	About         string // what is drawn, for readers who don't see it
	Width, Height int
	Bars          []bar
}

// bar is a subject's median; From and To are the ends of the spread.
type bar struct {
	Class       string // of the page's style sheet
	Name, Value string
	Text, Y     int // of the line of text, and of the bar
	Length      string
	From, To    string
}

func newChart(c *Case) chart {
	out := chart{Width: chartWidth, Height: barHeight*len(c.Subjects) + 4}
	most := 0.0
	for _, s := range c.Subjects {
		most = max(most, s.Max)
	}
	at := func(v float64) string {
		if most == 0 {
			return "0"
		}
		return fmt.Sprintf("%.1f", (chartWidth-2)*v/most)
	}
	var about []string
	for i := range c.Subjects {
		s := &c.Subjects[i]
		y := i * barHeight
		out.Bars = append(out.Bars, bar{Class: string(s.Class), Name: s.Name, Value: s.String(), Text: y + 14, Y: y + 19, Length: at(s.Median), From: at(s.Min), To: at(s.Max)})
		about = append(about, s.Name+" "+s.String())
	}
	out.About = fmt.Sprintf("Bars, in %s: %s.", c.Unit, strings.Join(about, "; "))
	return out
}
