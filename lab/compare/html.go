package compare

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"time"

	"kproxy.dev/kproxy/lab/compare/chart"
	"kproxy.dev/kproxy/lab/compare/statistics"
)

//go:embed report.html.tmpl
var pageText string

var pageTemplate = template.Must(chart.Template(template.New("page")).Funcs(template.FuncMap{
	"figure":    statistics.Figure,
	"thousands": statistics.Thousands,
	"count":     count,
	"percent":   func(v float64) string { return fmt.Sprintf("%.0f%%", 100*v) },
	"date":      func(t time.Time) string { return t.UTC().Format("2 January 2006, 15:04 UTC") },
	"seconds":   func(s float64) string { return (time.Duration(s) * time.Second).String() },
	"services":  servicesLabel,
}).Parse(pageText))

// page is what the template shows.
type page struct {
	*Report
	Sections []section
}

// section is a few figures that belong together.
type section struct {
	ID      string
	Title   string
	Figures []figureOnPage
}

// figureOnPage is a chart with the table of what it shows.
type figureOnPage struct {
	Chart chart.Chart
	Rows  []*Row
}

// sectionKeys are the sections and the rows in them. The texts about them are
// in the template, by the section's ID.
var sectionKeys = []struct {
	id, title string
	keys      []string
}{
	{"throughput", "Throughput", []string{keyThroughput, keyThroughputCPU}},
	{"connections", "New connections", []string{keyConnections, keyConnectionsCPU, keyConnectionsMedian, keyConnectionsTail}},
	{"requests", "Requests", []string{keyRequestsMedian, keyRequestsTail, keyDatagramsMedian, keyDatagramsTail}},
	{"sessions", "New UDP sessions", []string{keySessions, keySessionsCPU}},
	{"first", "The first packet among many services", []string{keyConnectMedian, keyConnectTail, keyAnswerMedian, keyAnswerTail}},
}

// WriteHTML writes the report as one page that needs nothing else: no network
// and no script.
func (r *Report) WriteHTML(w io.Writer) error {
	p := page{Report: r}
	for _, s := range sectionKeys {
		out := section{ID: s.id, Title: s.title}
		for _, key := range s.keys {
			if rows := r.rows(key); len(rows) > 0 {
				c := newChart(fmt.Sprintf("chart-%s", key), rows)
				out.Figures = append(out.Figures, figureOnPage{c, rows})
			}
		}
		if len(out.Figures) > 0 {
			p.Sections = append(p.Sections, out)
		}
	}
	return pageTemplate.Execute(w, p)
}

// rows of one figure, for every number of services.
func (r *Report) rows(key string) []*Row {
	var out []*Row
	for i := range r.Rows {
		if r.Rows[i].Key == key {
			out = append(out, &r.Rows[i])
		}
	}
	return out
}

func servicesLabel(n int) string {
	if n == 0 {
		return ""
	}
	return "among " + count(n, "service")
}

// newChart draws rows of one figure; each is a group, with a label if there is
// more than one.
func newChart(id string, rows []*Row) chart.Chart {
	var groups []chart.Group
	for _, row := range rows {
		g := chart.Group{Label: servicesLabel(row.Services)}
		for i := range row.Cells {
			c := &row.Cells[i]
			b := chart.Bar{Class: string(c.Plane), Name: c.Plane.Name(), Spread: c.Spread}
			for _, p := range c.Parts {
				b.Parts = append(b.Parts, chart.Part(p))
			}
			g.Bars = append(g.Bars, b)
		}
		groups = append(groups, g)
	}
	return chart.New(id, rows[0].Title, rows[0].Unit, groups)
}
