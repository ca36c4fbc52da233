package chart

import (
	"fmt"
	"html/template"
)

// Template adds the template "chart", which writes a [Chart]. Its title is the
// page's: the element with the chart's ID and "-title".
func Template(t *template.Template) *template.Template {
	return template.Must(t.Funcs(template.FuncMap{
		"px": func(v float64) string { return fmt.Sprintf("%.1f", v) },
	}).Parse(text)) // the text is constant
}

const text = `{{define "chart"}}<svg class="chart" viewBox="0 0 {{.Width}} {{.Height}}" role="img" aria-labelledby="{{.ID}}-title {{.ID}}-about">
<desc id="{{.ID}}-about">{{.About}}</desc>
{{- $width := .Width}}
{{- range .Groups}}
{{- if .Label}}
<text class="group" x="0" y="{{.Y}}">{{.Label}}</text>
{{- end}}
{{- range $b := .Bars}}
<text x="0" y="{{.Text}}">{{.Name}}</text><text class="value" x="{{$width}}" y="{{.Text}}">{{.Value}}</text>
<g transform="translate(1 {{.Y}})">
{{- if .Parts}}
{{- range .Parts}}
<rect class="part{{.Index}}" x="{{px .X}}" y="0" width="{{px .Width}}" height="12"><title>{{.Name}}</title></rect>
{{- end}}
<rect class="track" x="0" y="0" width="{{px .Width}}" height="12"/>
{{- else}}
<rect class="{{.Class}}" x="0" y="0" width="{{px .Width}}" height="12"/>
{{- end}}
{{- if ne .From .To}}
<path class="whisker" d="M{{px .From}} 14.5H{{px .To}}M{{px .From}} 12.5v4M{{px .To}} 12.5v4"/>
{{- end}}
</g>
{{- end}}
{{- end}}
</svg>{{end}}`
