package file

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/strict"
)

// write puts files below dir, creating directories.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// web is a Service with an endpoint slice; each digit makes another.
func web(name string, digit int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata:
  name: %[1]s
spec:
  clusterIP: 10.96.0.%[2]d
  ports:
  - port: 80
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: %[1]s-1
  labels:
    kubernetes.io/service-name: %[1]s
addressType: IPv4
ports:
- port: 8080
endpoints:
- addresses: [10.2.0.%[2]d]
`, name, digit)
}

// served renders a Snapshot as one line a service port.
func served(s *service.Snapshot) (out []string) {
	for p, eps := range s.All() {
		line := fmt.Sprint(p.Key, " ", p.ClusterIPs[0], ":", p.Number)
		for _, e := range eps {
			line += " " + e.Address.String()
		}
		out = append(out, line)
	}
	return out
}

func TestLoadDirectory(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"b.yaml":        web("b", 2),
		"a.yml":         web("a", 1),
		"c.json":        `{"apiVersion":"v1","kind":"Service","metadata":{"name":"c"},"spec":{"clusterIP":"10.96.0.3","ports":[{"port":80}]}}`,
		"node.yaml":     "apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z}}\nspec: {podCIDR: 10.1.0.0/24}\n",
		"README.md":     "not: [a manifest",
		".hidden.yaml":  "not: [a manifest",
		"d.yaml~":       "not: [a manifest",
		".d.yaml.swp":   "not: [a manifest",
		"#d.yaml#":      "not: [a manifest",
		".#d.yaml":      "not: [a manifest",
		"d.yaml.bak":    "not: [a manifest",
		"sub/e.yaml":    "not: [a manifest",
		"sub.yaml/e.md": "a directory named like a manifest",
	})
	s, problems, err := Load([]string{dir}, "n1")
	if err != nil || len(problems) > 0 {
		t.Fatalf("%v, %v", err, lines(problems))
	}
	want := []string{"default/a 10.96.0.1:80 10.2.0.1:8080", "default/b 10.96.0.2:80 10.2.0.2:8080", "default/c 10.96.0.3:80"}
	if diff := cmp.Diff(want, served(s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := s.Node(); n.Zone != "z" || len(n.PodCIDRs) != 1 || n.PodCIDRs[0] != netip.MustParsePrefix("10.1.0.0/24") {
		t.Errorf("node %+v", n)
	}
	p, _, _ := s.Get(service.Key{Namespace: "default", Name: "b", Protocol: service.TCP})
	if want := filepath.Join(dir, "b.yaml") + ":1"; p.Source != want {
		t.Errorf("source %q, want %q", p.Source, want)
	}
}

// Paths take precedence in the order given, files of a directory by name.
func TestLoadReportsSecondDefinitions(t *testing.T) {
	t.Chdir(t.TempDir())
	write(t, ".", map[string]string{
		"z.yaml":   web("a", 1) + "---\n" + web("a", 2),
		"m/1.yaml": web("a", 3) + "---\n" + web("b", 4),
		"m/2.yaml": web("b", 5),
	})
	s, problems, err := Load([]string{"z.yaml", "./m/", "m/2.yaml", "m"}, "n1")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"z.yaml:22: Service default/a: defined a second time; the one at z.yaml:1 is in force",
		"z.yaml:31: EndpointSlice default/a-1: defined a second time; the one at z.yaml:10 is in force",
		"m/1.yaml:1: Service default/a: defined a second time; the one at z.yaml:1 is in force",
		"m/1.yaml:10: EndpointSlice default/a-1: defined a second time; the one at z.yaml:10 is in force",
		"m/2.yaml:1: Service default/b: defined a second time; the one at m/1.yaml:22 is in force",
		"m/2.yaml:10: EndpointSlice default/b-1: defined a second time; the one at m/1.yaml:31 is in force",
	}
	if diff := cmp.Diff(want, lines(problems)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"default/a 10.96.0.1:80 10.2.0.1:8080", "default/b 10.96.0.4:80 10.2.0.4:8080"}, served(s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLoadReportsPortsThatNothingMatches(t *testing.T) {
	t.Chdir(t.TempDir())
	write(t, ".", map[string]string{
		"a.yaml": strings.Replace(web("a", 1), "- port: 80\n", "- port: 80\n    name: http\n", 1),
		"b.yaml": "apiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec: {clusterIP: 10.96.0.2, ports: [{name: x, port: 1}, {name: y, port: 2, protocol: UDP}]}\n" +
			"---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: b}\nsubsets: [{addresses: [{ip: 10.2.0.2}], ports: [{name: x, port: 1}, {name: y, port: 2}]}]\n",
		"c.yaml": strings.Replace(web("c", 3), "service-name: c", "service-name: unknown", 1),
		"d.yaml": strings.Replace(strings.Replace(web("d", 4), "clusterIP: 10.96.0.4", "clusterIP: None", 1), "- port: 8080", "- port: 8080\n  name: x", 1),
	})
	_, problems, err := Load([]string{"."}, "n1")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`a.yaml:11: EndpointSlice default/a-1: ports[0]: Service default/a has no port ""/TCP, its ports are "http"/TCP`,
		`b.yaml:6: Endpoints default/b: subsets[0].ports[1]: Service default/b has no port "y"/TCP, its ports are "x"/TCP, "y"/UDP`,
	}
	if diff := cmp.Diff(want, lines(problems)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLoadPathsThatCannotBeRead(t *testing.T) {
	t.Chdir(t.TempDir())
	write(t, ".", map[string]string{"a.yaml": web("a", 1), "broken.yaml": "a: b: c\n"})
	if err := syscall.Mkfifo("pipe.yaml", 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere.yaml", "link.yaml"); err != nil {
		t.Fatal(err)
	}
	big, err := os.Create("big.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(big.Truncate(strict.MaxFileSize+1), big.Close()); err != nil {
		t.Fatal(err)
	}
	s, problems, err := Load([]string{"missing.yaml", "a.yaml/sub", "."}, "n1")
	if want := "read manifests: stat missing.yaml: no such file or directory\nread manifests: stat a.yaml/sub: not a directory"; err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		t.Error("the error doesn't say that the path doesn't exist")
	}
	want := []string{
		"big.yaml: larger than the 16 MiB that a file may have: split it into several files",
		"broken.yaml:1: mapping values are not allowed in this context",
		"link.yaml: no such file or directory",
		"pipe.yaml: not a regular file",
	}
	if diff := cmp.Diff(want, lines(problems)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"default/a 10.96.0.1:80 10.2.0.1:8080"}, served(s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLoadNothing(t *testing.T) {
	s, problems, err := Load(nil, "n1")
	if err != nil || len(problems) > 0 || s.Len() != 0 || s.Node().Name != "n1" {
		t.Errorf("%d ports for %q, %v, %v", s.Len(), s.Node().Name, lines(problems), err)
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, n := range []int{10, 100, 1_000, 10_000} {
		var text strings.Builder
		for i := range n {
			text.WriteString(strings.Replace(web(fmt.Sprintf("svc-%d", i), 1), "10.96.0.1", fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), 1) + "---\n")
		}
		dir := b.TempDir()
		write(b, dir, map[string]string{"all.yaml": text.String()})
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(text.Len()))
			for b.Loop() {
				if s, problems, err := Load([]string{dir}, "n1"); err != nil || len(problems) > 0 || s.Len() != n {
					b.Fatalf("%d ports, %v, %v", s.Len(), problems, err)
				}
			}
		})
	}
}
