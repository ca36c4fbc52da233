package compare

import (
	"fmt"
	"strings"
)

// Measures of a chart, in units of its view box, which is as wide as a phone,
// so that its text is as large as the page's there.
const (
	chartWidth  = 340
	groupHeight = 24
	barHeight   = 38 // with its line of text
	partNumber  = 4
)

// chart is bars, one below the other, ready to be drawn. Bars of all groups
// have the same scale.
type chart struct {
	ID     string
	Title  string
	About  string // what is drawn, for those who don't see it
	Unit   string
	Width  int
	Height int
	Groups []chartGroup
	Parts  []string // legend of bars that are made of parts
}

type chartGroup struct {
	Label string
	Y     int // base line of the label
	Bars  []chartBar
}

type chartBar struct {
	Plane Plane
	Name  string
	Value string
	Text  int // base line of name and value
	Y     int // of the bar
	Width float64
	// From and To are the ends of the spread; equal for none.
	From, To float64
	Parts    []chartPart
}

type chartPart struct {
	Index int // of the pattern
	Name  string
	X     float64
	Width float64
}

// newChart draws rows of one figure; each is a group, with a label if there is
// more than one.
func newChart(id string, rows []*Row, label func(*Row) string) chart {
	first := rows[0]
	c := chart{ID: id, Title: first.Title, Unit: first.Unit, Width: chartWidth}
	scale := greatest(rows)
	y := 0
	var about []string
	for _, row := range rows {
		g := chartGroup{Label: label(row)}
		if g.Label != "" {
			g.Y = y + groupHeight - 8
			y += groupHeight
		}
		for i := range row.Cells {
			cell := &row.Cells[i]
			b := newBar(cell, scale)
			b.Text, b.Y = y+14, y+19
			y += barHeight
			g.Bars = append(g.Bars, b)
			about = append(about, strings.TrimSpace(g.Label+" "+cell.Plane.Name())+" "+cell.String())
		}
		c.Groups = append(c.Groups, g)
	}
	c.Height = y + 4
	c.About = fmt.Sprintf("Bars, in %s: %s.", first.Unit, strings.Join(about, "; "))
	for _, p := range first.Cells[0].Parts {
		c.Parts = append(c.Parts, p.Name)
	}
	return c
}

// greatest is what a full bar stands for.
func greatest(rows []*Row) float64 {
	var most float64
	for _, row := range rows {
		for i := range row.Cells {
			most = max(most, row.Cells[i].Max, row.Cells[i].Median)
		}
	}
	if most == 0 {
		return 1
	}
	return most
}

func newBar(c *Cell, scale float64) chartBar {
	at := func(v float64) float64 { return (chartWidth - 2) * v / scale }
	b := chartBar{Plane: c.Plane, Name: c.Plane.Name(), Value: c.String(), Width: at(c.Median), From: at(c.Min), To: at(c.Max)}
	// Medians of parts needn't add up to the median of sums: they share it.
	var sum float64
	for _, p := range c.Parts {
		sum += p.Value
	}
	x := 0.0
	for i, p := range c.Parts {
		if sum > 0 {
			w := b.Width * p.Value / sum
			b.Parts = append(b.Parts, chartPart{i % partNumber, p.Name, x, w})
			x += w
		}
	}
	return b
}
