package monitoring

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is the part of Grafana's model that tests look at.
type dashboard struct {
	UID           string  `json:"uid"`
	Title         string  `json:"title"`
	SchemaVersion int     `json:"schemaVersion"`
	Panels        []panel `json:"panels"`
	Templating    struct {
		List []struct {
			Name, Type string
			Datasource source `json:"datasource"`
		} `json:"list"`
	} `json:"templating"`
	Annotations struct {
		List []struct {
			BuiltIn    int    `json:"builtIn"`
			Expr       string `json:"expr"`
			Datasource source `json:"datasource"`
		} `json:"list"`
	} `json:"annotations"`
}

type source struct{ Type, UID string }

// ours is the data source that a variable chooses: no dashboard knows another's uid.
var ours = source{Type: "prometheus", UID: "${datasource}"}

type panel struct {
	ID                       int
	Type, Title, Description string
	Datasource               source
	GridPos                  struct{ H, W, X, Y int }
	Targets                  []struct {
		RefID      string `json:"refId"`
		Expr       string `json:"expr"`
		Datasource source `json:"datasource"`
	}
	FieldConfig struct {
		Defaults struct{ Unit string }
	}
}

func load(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal(read(t, filepath.Join(folder, "dashboard.json")), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// units are the ones in use, of Grafana's list (packages/grafana-data/src/valueFormats/categories.ts).
var units = []string{"short", "percentunit", "s", "bytes", "Bps", "cps", "ops", "pps"}

func TestDashboard(t *testing.T) {
	d := load(t)
	if d.UID == "" || d.Title == "" || d.SchemaVersion < 36 { // since when data sources are objects
		t.Errorf("uid %q, title %q, schema version %d", d.UID, d.Title, d.SchemaVersion)
	}
	ids, titles := map[int]bool{}, map[string]bool{}
	for _, p := range d.Panels {
		if p.ID == 0 || ids[p.ID] || p.Title == "" || titles[p.Title] {
			t.Errorf("%q: its id %d or its title isn't its own", p.Title, p.ID)
		}
		ids[p.ID], titles[p.Title] = true, true
		if p.Type == "row" {
			continue
		}
		if p.Datasource != ours || p.Description == "" || !slices.Contains(units, p.FieldConfig.Defaults.Unit) || len(p.Targets) == 0 {
			t.Errorf("%q: data source %v, description %q, unit %q, %d queries", p.Title, p.Datasource, p.Description, p.FieldConfig.Defaults.Unit, len(p.Targets))
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] || q.Datasource != ours {
				t.Errorf("%q: query %q of %v", p.Title, q.RefID, q.Datasource)
			}
			refs[q.RefID] = true
		}
	}
	checkGrid(t, d.Panels)
}

// checkGrid: panels are within the 24 columns, in order, and don't overlap.
func checkGrid(t *testing.T, panels []panel) {
	t.Helper()
	type cell struct{ x, y int }
	taken := map[cell]string{}
	for _, p := range panels {
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("%q: %+v isn't in the grid", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, ok := taken[cell{x, y}]; ok {
					t.Fatalf("%q lies over %q", p.Title, other)
				}
				taken[cell{x, y}] = p.Title
			}
		}
	}
}

// TestQueriesAreRight: Prometheus understands every query, and every variable in
// them is one that the dashboard or Grafana has.
func TestQueriesAreRight(t *testing.T) {
	d := load(t)
	variables := map[string]string{"__range": "1h", "__rate_interval": "5m", "datasource": ""}
	for _, v := range d.Templating.List {
		variables[v.Name] = ".+"
		if v.Type == "query" && v.Datasource != ours {
			t.Errorf("variable %s has data source %v", v.Name, v.Datasource)
		}
	}
	type recording struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var queries []recording
	add := func(expr string) {
		filled := regexp.MustCompile(`\$\{?(\w+)\}?`).ReplaceAllStringFunc(expr, func(v string) string {
			value, ok := variables[strings.Trim(v, "${}")]
			if !ok {
				t.Errorf("%s: there is no variable %s", expr, v)
			}
			return value
		})
		queries = append(queries, recording{fmt.Sprintf("query:%d", len(queries)), filled})
	}
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			add(q.Expr)
		}
	}
	for _, a := range d.Annotations.List {
		if a.BuiltIn == 0 {
			add(a.Expr)
		}
	}
	type group struct {
		Name  string      `json:"name"`
		Rules []recording `json:"rules"`
	}
	promtool(t, "check", "rules", write(t, t.TempDir(), "queries.yaml", map[string]any{"groups": []group{{"dashboard", queries}}}))
}
