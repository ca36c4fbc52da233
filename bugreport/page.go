package bugreport

import (
	"bytes"
	"html/template"
	"time"
)

// page makes the archive's page. It has no script and loads nothing from elsewhere: whoever reads it may be offline.
func (r *Report) page() ([]byte, error) {
	var b bytes.Buffer
	err := pageTemplate.Execute(&b, map[string]any{
		"Title": r.folder, "At": r.cfg.At.UTC().Format(time.RFC3339), "Masked": r.cfg.Mask != nil, "Lines": r.lines, "Files": r.files,
	})
	return b.Bytes(), err
}

var pageTemplate = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{.Title}}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
td:nth-child(2) { text-align: right; } pre { overflow: auto; padding: .5rem; border: 1px solid; font-size: 12px; }
</style>
<h1>{{.Title}}</h1>
<p>Taken at {{.At}}. {{if .Masked}}Addresses, and the names that kproxy knows, are replaced: the same ones by the same ones, networks by networks.{{else}}Addresses and names are as they are; kproxy bugreport --mask replaces them.{{end}}</p>
<h2>What stands out</h2>
{{if .Lines}}<ul>{{range .Lines}}<li>{{.}}{{end}}</ul>{{else}}<p>Nothing.</p>{{end}}
<h2>Files</h2>
<table>
<tr><th>file<th>bytes<th>what it is
{{range .Files}}<tr><td>{{if .Size}}<a href="{{.Name}}">{{.Name}}</a>{{else}}{{.Name}}{{end}}<td>{{.Size}}<td>{{.What}}{{if .Problem}} <strong>({{.Problem}})</strong>{{end}}
{{end}}</table>
{{range .Files}}{{if .Excerpt}}<h2 id="{{.Name}}">{{.Name}}</h2>
<pre>{{.Excerpt}}</pre>
{{end}}{{end}}</html>
`))
