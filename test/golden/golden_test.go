// Package golden holds one txtar archive per scenario: the manifests that go
// in, and the plan, the portal and every mode's kernel rules that come out.
//
// nothing.txtar is what stands without any service: the portal and the chains
// that all services share. The other scenarios show only the lines that they
// add to that.
//
// go test ./test/golden -update rewrites what comes out.
package golden

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/plan"
)

var update = flag.Bool("update", false, "rewrite the output sections of every scenario")

// modes are rendered for every scenario, in this order.
var modes = []plan.Mode{plan.ModeUserspace, plan.ModeIPTables, plan.ModeIPVS}

func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios found: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(file, ".txtar"), func(t *testing.T) { checkScenario(t, file) })
	}
}

func checkScenario(t *testing.T, file string) {
	archive, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	manifests := t.TempDir()
	got := &txtar.Archive{Comment: archive.Comment}
	for _, f := range archive.Files {
		if !strings.HasPrefix(f.Name, "manifests/") {
			continue
		}
		got.Files = append(got.Files, f)
		if err := os.WriteFile(filepath.Join(manifests, filepath.Base(f.Name)), f.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, mode := range modes {
		sections, err := agent.Render(agent.RenderOptions{Mode: mode, Manifests: []string{manifests}, Node: "node-1"})
		if err != nil {
			t.Fatalf("mode %s: %v", mode, err)
		}
		shared := map[string]bool{}
		if file != "nothing.txtar" {
			shared = withoutServices(t, mode)
		}
		for _, s := range sections {
			text := added(s.Text, shared)
			if text != "" {
				got.Files = append(got.Files, txtar.File{Name: string(mode) + "/" + s.Name, Data: []byte(text)})
			}
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := txtar.Format(got)
	if *update {
		if !bytes.Equal(want, text) {
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("rendered output changed (-want +got); run with -update if that is meant:\n%s", diff)
	}
}

// withoutServices returns the lines that are rendered for no services at all.
func withoutServices(t *testing.T, mode plan.Mode) map[string]bool {
	sections, err := agent.Render(agent.RenderOptions{Mode: mode, Manifests: []string{t.TempDir()}, Node: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string]bool{}
	for _, s := range sections {
		for line := range strings.Lines(s.Text) {
			lines[line] = true
		}
	}
	return lines
}

// added returns the lines of text that aren't shared, nor a list of what is empty.
func added(text string, shared map[string]bool) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !shared[line] && !strings.HasPrefix(line, "# empty:") || len(shared) == 0 {
			b.WriteString(line)
		}
	}
	return b.String()
}
