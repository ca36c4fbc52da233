package deploy

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const (
	// bootstrap installs what a container needs before it can run make.
	bootstrap = "apt-get update -q && apt-get install -q -y ca-certificates curl git make"
	// trust lets git, as the container's root, read what the runner's user has checked out.
	trust = `git config --global --add safe.directory "$GITHUB_WORKSPACE"`
)

// TestWorkflows: what GitHub runs is what make runs anywhere: every command is a target of the Makefile. A release has notes
// and is tested before it is made, and published last.
func TestWorkflows(t *testing.T) {
	makefile, err := os.ReadFile(root + "/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(root + "/.github/workflows/*.yml")
	if err != nil || len(files) < 2 {
		t.Fatalf("workflows: %q, %v", files, err)
	}
	ran := map[string][]string{}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var w struct {
			Jobs map[string]struct {
				Steps []struct{ Run, Uses string }
			}
		}
		if err := yaml.Unmarshal(text, &w); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, job := range w.Jobs {
			for i, step := range job.Steps {
				if strings.HasPrefix(step.Uses, "actions/checkout@") && job.Steps[i+1].Run != trust {
					t.Errorf("%s: after a checkout it runs %q, want %s", name, job.Steps[i+1].Run, trust)
				}
				if (step.Run == "") == (step.Uses == "") {
					t.Errorf("%s: a step that runs %q and uses %q", name, step.Run, step.Uses)
				}
				if step.Run == "" || step.Run == bootstrap || step.Run == trust {
					continue
				}
				target, ok := strings.CutPrefix(step.Run, "make ")
				if !ok || !regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(target)+`: .*##`).Match(makefile) {
					t.Errorf("%s runs %q, which is no target of the Makefile", name, step.Run)
				}
				ran[filepath.Base(name)] = append(ran[filepath.Base(name)], target)
			}
		}
	}
	if !slices.Equal(ran["release.yml"], []string{"notes", "test", "release", "publish"}) || !slices.Contains(ran["check.yml"], "test") || !slices.Contains(ran["check.yml"], "check") {
		t.Errorf("they run %q", ran)
	}
}

// TestMakeTakesTheTag: a workflow names the version by its environment, as tests may leave a tree that git calls dirty.
func TestMakeTakesTheTag(t *testing.T) {
	t.Setenv("VERSION", "v1.2.3")
	if out, err := command(root, "make", "--dry-run", "image", "release", "publish"); err != nil || strings.Count(out, "VERSION=v1.2.3 ") != 3 {
		t.Errorf("make: %v\n%s", err, out)
	}
}

// TestNotes: a release's notes are what the changelog has below its version, and those of another version what is unreleased.
// A release without notes is refused before it is made.
func TestNotes(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/deploy", 0o755), run("cp", folder+"/notes.sh", dir+"/deploy"), os.WriteFile(dir+"/CHANGELOG.md",
		[]byte("# Changelog\n\n## Unreleased\n\n- soon\n\n## 0.2.0 (2027)\n\n### A\n\n- [b](docs/b.md)\n\n## 0.1.0\n\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KPROXY_PAGES", "https://pages/")
	for version, want := range map[string]string{
		"v0.2.0":            "### A\n\n- [b](https://pages/docs/b.md)",
		"v0.3.0-rc.1":       "- soon",
		"v0.2.0-5-g95e9e23": "- soon",
		"v0.1.0":            "", // empty
		"v0.3.0":            "", // missing
	} {
		t.Setenv("VERSION", version)
		out, err := command(dir, "deploy/notes.sh")
		if want != "" && (err != nil || strings.TrimSpace(out) != want) || want == "" && (err == nil || !strings.Contains(out, "'## "+version[1:]+"'")) {
			t.Errorf("notes of %s: %v\n%s\nwant %q", version, err, out, want)
		}
	}
	t.Setenv("VERSION", "v99.0.0")
	if err := run(folder+"/release.sh", dir+"/dist"); err == nil || !strings.Contains(err.Error(), "'## 99.0.0'") {
		t.Errorf("make release: %v", err)
	}
	if made, err := filepath.Glob(dir + "/dist/kproxy*"); err != nil || len(made) > 0 {
		t.Errorf("made before the notes: %q, %v", made, err)
	}
}

// TestIssueForms: whoever reports a problem is asked for the bug report, and no form is one that GitHub can't read.
func TestIssueForms(t *testing.T) {
	files, err := filepath.Glob(root + "/.github/ISSUE_TEMPLATE/*.yml")
	if err != nil {
		t.Fatal(err)
	}
	required := map[string]bool{}
	for _, name := range files {
		if filepath.Base(name) == "config.yml" {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var form struct {
			Name        string `json:"name"`
			Description string `json:"description"`
			Body        []struct {
				Type        string          `json:"type"`
				ID          string          `json:"id"`
				Attributes  map[string]any  `json:"attributes"`
				Validations map[string]bool `json:"validations"`
			} `json:"body"`
		}
		if err := yaml.UnmarshalStrict(text, &form); err != nil || form.Name == "" || form.Description == "" || len(form.Body) == 0 {
			t.Errorf("%s: %v: %+v", name, err, form)
		}
		for _, field := range form.Body {
			if field.Type != "markdown" && field.Attributes["label"] == nil {
				t.Errorf("%s: %s has no label", name, field.ID)
			}
			required[field.ID] = field.Validations["required"]
		}
	}
	if !required["bugreport"] {
		t.Errorf("no form requires a bug report: %v", required)
	}
}

// TestSourcesNameNoRegistry: the image in deploy/ is the one that make image makes. A registry that has one is for a release to name.
func TestSourcesNameNoRegistry(t *testing.T) {
	named := regexp.MustCompile(`(?m)^\s*(?:image|newName|repository): *([^{\s].*)$`)
	found := 0
	err := filepath.WalkDir(folder, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			if found++; m[1] != "kproxy" {
				t.Errorf("%s names the image %s", path, m[1])
			}
		}
		return err
	})
	if err != nil || found < 6 {
		t.Errorf("%d images found: %v", found, err)
	}
}
