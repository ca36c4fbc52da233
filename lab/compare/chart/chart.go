// Package chart draws bars with their spread, ready for a page that has no
// script: [New] computes them, [Template] writes them as SVG. What a reader sees
// of a bar is in its description too, for those who don't see it. It is pure.
package chart

import (
	"fmt"
	"strings"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// Measures of a chart, in units of its view box, which is as wide as a phone,
// so that its text is as large as the page's there.
const (
	chartWidth  = 340
	groupHeight = 24
	barHeight   = 38 // with its line of text
	partNumber  = 4
)

// Chart is bars, one below the other, ready to be drawn. Bars of all groups
// have the same scale.
type Chart struct {
	ID     string
	Title  string
	About  string // what is drawn, for those who don't see it
	Unit   string
	Width  int
	Height int
	Groups []DrawnGroup
	Parts  []string // legend of bars that are made of parts
}

// DrawnGroup is a group of bars where it is drawn.
type DrawnGroup struct {
	Label string
	Y     int // base line of the label
	Bars  []DrawnBar
}

// DrawnBar is a bar where it is drawn.
type DrawnBar struct {
	Class string
	Name  string
	Value string
	Text  int // base line of name and value
	Y     int // of the bar
	Width float64
	// From and To are the ends of the spread; equal for none.
	From, To float64
	Parts    []DrawnPart
}

// DrawnPart is a part of a bar where it is drawn.
type DrawnPart struct {
	Index int // of the pattern
	Name  string
	X     float64
	Width float64
}

// Group is some bars, with a label if there is more than one group.
type Group struct {
	Label string
	Bars  []Bar
}

// Bar is what a bar shows.
type Bar struct {
	Class string // of the page's style sheet
	Name  string
	statistics.Spread
	Parts []Part // what it is made of, roughly; may be none
}

// Part is a part of a bar.
type Part struct {
	Name  string
	Value float64
}

// New draws groups of bars.
func New(id, title, unit string, groups []Group) Chart {
	c := Chart{ID: id, Title: title, Unit: unit, Width: chartWidth}
	scale := greatest(groups)
	y := 0
	var about []string
	for _, group := range groups {
		g := DrawnGroup{Label: group.Label}
		if g.Label != "" {
			g.Y = y + groupHeight - 8
			y += groupHeight
		}
		for i := range group.Bars {
			bar := &group.Bars[i]
			b := draw(bar, scale)
			b.Text, b.Y = y+14, y+19
			y += barHeight
			g.Bars = append(g.Bars, b)
			about = append(about, strings.TrimSpace(g.Label+" "+bar.Name)+" "+bar.String())
		}
		c.Groups = append(c.Groups, g)
	}
	c.Height = y + 4
	c.About = fmt.Sprintf("Bars, in %s: %s.", unit, strings.Join(about, "; "))
	if len(groups) > 0 && len(groups[0].Bars) > 0 {
		for _, p := range groups[0].Bars[0].Parts {
			c.Parts = append(c.Parts, p.Name)
		}
	}
	return c
}

// greatest is what a full bar stands for.
func greatest(groups []Group) float64 {
	var most float64
	for _, g := range groups {
		for i := range g.Bars {
			most = max(most, g.Bars[i].Max, g.Bars[i].Median)
		}
	}
	if most == 0 {
		return 1
	}
	return most
}

func draw(bar *Bar, scale float64) DrawnBar {
	at := func(v float64) float64 { return (chartWidth - 2) * v / scale }
	b := DrawnBar{Class: bar.Class, Name: bar.Name, Value: bar.String(), Width: at(bar.Median), From: at(bar.Min), To: at(bar.Max)}
	// Medians of parts needn't add up to the median of sums: they share it.
	var sum float64
	for _, p := range bar.Parts {
		sum += p.Value
	}
	x := 0.0
	for i, p := range bar.Parts {
		if sum > 0 {
			w := b.Width * p.Value / sum
			b.Parts = append(b.Parts, DrawnPart{i % partNumber, p.Name, x, w})
			x += w
		}
	}
	return b
}
