// Package test checks what the compiler doesn't: that the folders keep to the
// architecture (layout_test.go). Its subfolders hold the tests that need more
// than one package: goldens, real packets, benchmarks.
package test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "kproxy.dev/kproxy"

// row is one row of the architecture's table of packages.
type row struct {
	folder  string
	imports string // kproxy's packages it may import; "*" means every one above
	third   string // modules of others it may import
	pure    bool   // no I/O: nothing from impure
}

// layout is the architecture: a package imports only packages above it, and
// only those its row names. Tests may import anything. When a row has to
// change, the design changes; say why in the commit.
var layout = []row{
	{folder: "service", pure: true},
	{folder: "service/wake", pure: true},
	{folder: "service/lockfile", third: "golang.org/x/sys"},
	{folder: "lb", imports: "service", pure: true},
	{folder: "health", imports: "service", pure: true},
	{folder: "health/probe", imports: "service health service/wake", third: "google.golang.org/grpc golang.org/x/sys golang.org/x/sync golang.org/x/time"},
	{folder: "health/passive", imports: "service health health/probe service/wake", third: "golang.org/x/net golang.org/x/time"},
	{folder: "plan", imports: "service lb health", pure: true},
	{folder: "kernel/netlink", third: "golang.org/x/sys"},
	{folder: "kernel", imports: "service plan kernel/netlink", third: vnetlink + " golang.org/x/net github.com/hashicorp/go-multierror"},
	{folder: "kernel/steering", imports: "kernel plan service", third: vnetlink + " github.com/coreos/go-iptables github.com/hashicorp/go-multierror"},
	{folder: "kernel/iptables", imports: "kernel kernel/steering kernel/netlink plan lb service", third: vnetlink + " github.com/hashicorp/go-multierror"},
	{folder: "kernel/ipvs", imports: "kernel kernel/steering kernel/netlink plan lb service", third: vnetlink + " github.com/moby/ipvs github.com/hashicorp/go-multierror"},
	{folder: "kernel/nftables", imports: "kernel kernel/steering kernel/netlink plan lb service", third: "golang.org/x/sys"},
	{folder: "kernel/leftovers", imports: "kernel kernel/netlink kernel/ipvs service", third: vnetlink + " github.com/hashicorp/go-multierror"},
	{folder: "userspace/handover", third: "github.com/fxamacker/cbor golang.org/x/sys"},
	{folder: "userspace", imports: "service lb plan health kernel/netlink userspace/handover", third: "github.com/pires/go-proxyproto golang.org/x/sys golang.org/x/sync golang.org/x/time"},
	{folder: "conntrack", imports: "service health plan kernel/netlink", third: "golang.org/x/net/bpf golang.org/x/sys"},
	{folder: "source/strict", third: "k8s.io/apimachinery go.yaml.in/yaml sigs.k8s.io/json"},
	{folder: "source", imports: "service source/strict", third: kubernetes},
	{folder: "source/file", imports: "service source source/strict service/wake", third: kubernetes + " github.com/fsnotify/fsnotify golang.org/x/sync"},
	{folder: "source/kube", imports: "service source service/wake", third: kubernetes + " k8s.io/client-go k8s.io/klog github.com/go-logr/logr"},
	// source: kube-proxy's reading of addresses with leading zeros.
	{folder: "config", imports: "service source source/strict", third: "sigs.k8s.io/yaml sigs.k8s.io/json k8s.io/kube-proxy k8s.io/component-base k8s.io/apimachinery"},
	{folder: "trace/netfilter", imports: "kernel kernel/steering kernel/netlink lb service", third: "golang.org/x/sys"},
	{folder: "lab", third: "golang.org/x/sys"},
	{folder: "trace", imports: "service health plan kernel kernel/steering kernel/netlink conntrack userspace trace/netfilter", third: vnetlink + " golang.org/x/sync"},
	{folder: "bugreport", imports: "service kernel conntrack trace/netfilter", third: vnetlink},
	{folder: "docs"},
	{folder: "agent/node", imports: "config service service/lockfile plan source/kube kernel kernel/steering kernel/iptables kernel/ipvs kernel/nftables", third: "golang.org/x/sys"},
	{folder: "agent/offline", imports: "agent/node service/lockfile config conntrack plan service source source/file source/kube kernel kernel/leftovers"},
	{folder: "agent/flows", imports: "conntrack health health/passive kernel lb plan service userspace service/wake", third: "golang.org/x/sys"},
	{folder: "agent/takeover", imports: "agent/node conntrack health service userspace/handover", third: "golang.org/x/sys"},
	{folder: "agent/nodehealth", imports: "plan service userspace/handover service/wake", third: "golang.org/x/sys"},
	{folder: "agent", imports: "*", third: "golang.org/x/sync golang.org/x/sys golang.org/x/time"},
	{folder: "web", imports: "service/lockfile plan service health trace docs", third: "github.com/prometheus/client_golang github.com/prometheus/client_model"},
	// The cluster's nodes, asked over the API server with the user's rights.
	{folder: "cmd/kproxy/cluster", imports: "plan service source/kube web", third: kubernetes + " k8s.io/client-go k8s.io/streaming"},
	{folder: "lab/report", third: "github.com/prometheus/procfs"},
	{folder: "lab/lesson"},
	{folder: "lab/load", imports: "plan web lab lab/report", third: "github.com/prometheus/procfs golang.org/x/sys"},
	{folder: "lab/compare", imports: "service plan conntrack lab lab/report lab/load"},
	{folder: "cmd/kproxy/screen", imports: "plan", third: "github.com/charmbracelet/x/ansi", pure: true},
	{folder: "cmd/kproxy/screen/terminal", third: "charm.land/bubbletea golang.org/x/sys golang.org/x/term"},
	{folder: "cmd/kproxy", imports: "*", third: "github.com/urfave/cli github.com/prometheus/client_golang golang.org/x/sync golang.org/x/sys golang.org/x/term sigs.k8s.io/yaml"},
	// The tests of most folders import it, so it imports few of them.
	{folder: "test/kerneltest", imports: "conntrack kernel kernel/steering kernel/iptables kernel/ipvs kernel/nftables plan service lab", third: vnetlink + " github.com/google/go-cmp"},
}

const (
	vnetlink   = "github.com/vishvananda/netlink github.com/vishvananda/netns golang.org/x/sys"
	kubernetes = "k8s.io/api k8s.io/apimachinery k8s.io/utils sigs.k8s.io/yaml go.yaml.in/yaml sigs.k8s.io/json"
)

// impure are the parts of the standard library that pure packages do without:
// they decide and compute, others read and write.
var impure = []string{"net", "net/http", "os", "os/exec", "log", "log/slog", "syscall", "context", "io/fs"}

// file is one parsed Go file of the repository.
type file struct {
	name   string // path from the root
	folder string
	test   bool
	ast    *ast.File
}

func TestFoldersAreInTheTable(t *testing.T) {
	for _, f := range parse(t) {
		if f.folder != "." && !strings.HasPrefix(f.folder+"/", "test/") && find(f.folder) < 0 {
			t.Errorf("%s: folder %s is not in the architecture's table of packages", f.name, f.folder)
		}
		if name := f.ast.Name.Name; slices.Contains([]string{"util", "utils", "common", "helpers", "misc", "shared"}, strings.TrimSuffix(name, "_test")) {
			t.Errorf("%s: package %s is named for nothing; name it for what it does", f.name, name)
		}
	}
}

func TestImports(t *testing.T) {
	for _, f := range parse(t) {
		at := find(f.folder)
		if f.test || at < 0 {
			continue
		}
		for _, spec := range f.ast.Imports {
			p, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if why := forbidden(at, p); why != "" {
				t.Errorf("%s imports %s: %s", f.name, p, why)
			}
		}
	}
}

// forbidden says why the package in row at may not import p; empty if it may.
func forbidden(at int, p string) string {
	r := layout[at]
	first, _, _ := strings.Cut(p, "/")
	switch {
	case strings.HasPrefix(p, module+"/"):
		return forbiddenOwn(at, strings.TrimPrefix(p, module+"/"))
	case strings.Contains(first, "."):
		for m := range strings.FieldsSeq(r.third) {
			if p == m || strings.HasPrefix(p, m+"/") {
				return ""
			}
		}
		return "others' modules are for the folders whose job they are"
	case p == "flag" && r.folder != "cmd/kproxy":
		return "flags are parsed under cmd/ only"
	case r.pure && slices.Contains(impure, p):
		return r.folder + " is pure: it touches nothing outside itself"
	}
	return ""
}

func forbiddenOwn(at int, folder string) string {
	target := find(folder)
	switch {
	case strings.HasPrefix(folder, "test/"):
		return "it is for tests"
	case target < 0:
		return "it is not in the table of packages"
	case target >= at:
		return "a package imports only packages above it in the table"
	case layout[at].imports == "*" || slices.Contains(strings.Fields(layout[at].imports), folder):
		return ""
	}
	return "its row in the table doesn't name it"
}

func find(folder string) int {
	return slices.IndexFunc(layout, func(r row) bool { return r.folder == folder })
}

// A kernel data plane is named in its folder, in the table of modes, in what users read and write
// (configuration, flags, the lab), and in tests. namesOfPlanes bounds how many lines of code of every
// other folder name one: a bound may only fall. A plane that is added needs none.
var namesOfPlanes = map[string]map[string]int{
	"ipvs": {
		"cmd/kproxy":       3,  // help, and the lab's tour
		"conntrack":        1,  // whose half-open entries nothing has rewritten
		"kernel/leftovers": 20, // what kube-proxy's mode left
		"plan":             3,  // the words for mode and data plane
		"source":           2,  // an annotation
	},
	"iptables": {
		"cmd/kproxy":       1, // help
		"kernel":           4, // its programs
		"kernel/leftovers": 1,
		"kernel/nftables":  1, // reads other programs' rules
		"plan":             3, // the words for mode and data plane
		"trace":            7, // commands that mend other programs' rules
		"trace/netfilter":  7, // reads other programs' rules
		"web":              4, // kube-proxy's names of metrics
	},
}

// ownFolders are where a plane's name belongs besides configuration and tests.
var ownFolders = map[string][]string{
	"ipvs":     {"kernel/ipvs"},
	"iptables": {"kernel/iptables", "kernel/steering"},
}

// planeNamesAllowed are folders that users or tests name planes in.
var planeNamesAllowed = []string{"config", "lab", "test"}

func TestPlanesAreNamedAtHome(t *testing.T) {
	files := parse(t)
	for plane, bounds := range namesOfPlanes {
		found := map[string]int{}
		for _, f := range files {
			allowed := slices.ContainsFunc(slices.Concat(planeNamesAllowed, ownFolders[plane]), func(a string) bool { return strings.HasPrefix(f.folder+"/", a+"/") })
			if f.test || allowed || slices.Contains(rowsOfPlanes, f.name) {
				continue
			}
			lines := map[int]bool{}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				text := ""
				switch n := n.(type) {
				case *ast.Ident:
					text = n.Name
				case *ast.BasicLit:
					text = n.Value
				}
				if strings.Contains(strings.ToLower(text), plane) {
					lines[fset.Position(n.Pos()).Line] = true
				}
				return true
			})
			found[f.folder] += len(lines)
		}
		for folder, n := range found {
			if n > bounds[folder] {
				t.Errorf("%d lines of code in %s name the data plane %s, %d are the bound: ask for what it can do instead", n, folder, plane, bounds[folder])
			} else if n < bounds[folder] {
				t.Errorf("%s names the data plane %s in %d lines: lower its bound, %d", folder, plane, n, bounds[folder])
			}
		}
	}
}

// rowsOfPlanes are the files with the table of planes and with that of flags, which are configuration.
var rowsOfPlanes = []string{"agent/node/planes.go", "cmd/kproxy/options.go"}

func TestPackagesHaveDocs(t *testing.T) {
	docs := map[string]bool{}
	for _, f := range parse(t) {
		name := strings.TrimSuffix(f.ast.Name.Name, "_test")
		prefix := "Package " + name + " "
		if name == "main" {
			prefix = "Command " + path.Base(f.folder) + " "
		}
		docs[f.folder] = docs[f.folder] || f.ast.Doc != nil && strings.HasPrefix(f.ast.Doc.Text(), prefix)
	}
	for folder, ok := range docs {
		if !ok {
			t.Errorf("%s has no package comment that says purpose, contract and concurrency", folder)
		}
	}
}

func TestHabits(t *testing.T) {
	for _, f := range parse(t) {
		if f.test || ast.IsGenerated(f.ast) {
			continue
		}
		commented := map[int]bool{} // lines with a comment
		for _, c := range f.ast.Comments {
			commented[fset.Position(c.Pos()).Line] = true
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil && n.Name.Name == "init" {
					t.Errorf("%s has a func init: make it a value or a call", f.name)
				}
			case *ast.CallExpr:
				excused := f.ast.Name.Name == "main" || commented[fset.Position(n.Pos()).Line]
				if name := callee(n); !excused && slices.Contains([]string{"panic", "os.Exit", "log.Fatal", "log.Fatalf"}, name) {
					t.Errorf("%s calls %s: return an error, or say in that line why it can't happen", f.name, name)
				}
			}
			return true
		})
		for _, c := range f.ast.Comments {
			for _, mark := range []string{"TODO", "FIXME", "XXX"} {
				if strings.Contains(c.Text(), mark) {
					t.Errorf("%s has a comment with %s: do it, or say what isn't there", f.name, mark)
				}
			}
		}
	}
}

// callee is the called function as written: "panic", "os.Exit".
func callee(c *ast.CallExpr) string {
	switch fn := c.Fun.(type) {
	case *ast.Ident:
		return fn.Name
	case *ast.SelectorExpr:
		if x, ok := fn.X.(*ast.Ident); ok {
			return x.Name + "." + fn.Sel.Name
		}
	}
	return ""
}

// fset has the positions of all that parse returns.
var fset = token.NewFileSet()

// parse returns every Go file of the repository.
func parse(t *testing.T) []file {
	t.Helper()
	files, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	return files
}

var parsed = sync.OnceValues(func() (files []file, err error) {
	const root = ".."
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && p != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "dist") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		parsed, err := parser.ParseFile(fset, p, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		files = append(files, file{
			name: rel, folder: path.Dir(rel), test: strings.HasSuffix(name, "_test.go"),
			ast: parsed,
		})
		return nil
	})
	return files, err
})
