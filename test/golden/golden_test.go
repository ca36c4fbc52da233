// Package golden holds one txtar archive per scenario: the manifests that go
// in, and the plan, the portal and every mode's kernel rules that come out.
//
// nothing.txtar is what stands without any service: the portal and the chains
// that all services share. The other scenarios show only the lines that they
// add to that. Mode auto has a section only where it isn't that of mode ipvs.
//
// A section "flags" holds flags of `kproxy run` that a scenario is about.
//
// go test ./test/golden -update rewrites what comes out.
package golden

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

var update = flag.Bool("update", false, "rewrite the output sections of every scenario")

// modes are rendered for every scenario, in this order; mode auto as on a host with a firewall.
var modes = []plan.Mode{plan.ModeUserspace, plan.ModeIPTables, plan.ModeIPVS, plan.ModeAuto, plan.ModeNFTables}

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
		if f.Name == flagsSection {
			got.Files = append(got.Files, f)
		}
		if !strings.HasPrefix(f.Name, "manifests/") {
			continue
		}
		got.Files = append(got.Files, f)
		if err := os.WriteFile(filepath.Join(manifests, filepath.Base(f.Name)), f.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, mode := range modes {
		for _, s := range outputs(t, mode, manifests, configOf(t, archive), file == "nothing.txtar") {
			if mode == plan.ModeAuto && slices.ContainsFunc(got.Files, func(f txtar.File) bool {
				return f.Name == string(plan.ModeIPVS)+"/"+s.Name && string(f.Data) == s.Text
			}) {
				continue
			}
			got.Files = append(got.Files, txtar.File{Name: string(mode) + "/" + s.Name, Data: []byte(s.Text)})
		}
	}
	if cfg := configOf(t, archive); cfg.IPVS.Scheduler == "" {
		sections := map[plan.Mode][]kernel.Section{}
		for _, mode := range []plan.Mode{plan.ModeAuto, plan.ModeNFTables} {
			cfg.Mode, cfg.Manifests = string(mode), []string{manifests}
			s, err := offline.Render(context.Background(), offline.RenderOptions{Config: cfg, Node: "node-1"})
			if err != nil {
				t.Fatal(err)
			}
			sections[mode] = s
		}
		if diff := cmp.Diff(sections[plan.ModeNFTables], sections[plan.ModeAuto]); diff != "" {
			t.Errorf("without a firewall, mode auto isn't mode nftables (-want +got):\n%s", diff)
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

// outputs returns what is rendered in a mode, and what isn't shared by every
// scenario: whole says that this is the one to show all.
func outputs(t *testing.T, mode plan.Mode, manifests string, cfg config.Config, whole bool) []kernel.Section {
	var out []kernel.Section
	shared := map[string]bool{}
	if !whole {
		for _, s := range rendered(t, mode, t.TempDir(), config.Default()) {
			for line := range strings.Lines(s.Text) {
				shared[line] = s.Name != "ipvs"
			}
		}
	}
	for _, s := range rendered(t, mode, manifests, cfg) {
		if s.Text = added(s.Text, shared); s.Text != "" {
			out = append(out, s)
		}
	}
	return out
}

func rendered(t *testing.T, mode plan.Mode, manifests string, cfg config.Config) []kernel.Section {
	cfg.Mode, cfg.Manifests = string(mode), []string{manifests}
	sections, err := offline.Render(context.Background(), offline.RenderOptions{Config: cfg, Node: "node-1", Firewalled: true})
	if err != nil {
		t.Fatalf("mode %s: %v", mode, err)
	}
	return sections
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
