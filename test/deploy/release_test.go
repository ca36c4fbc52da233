package deploy

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// TestRelease makes a release twice, which has to be the same, and runs what is in it.
func TestRelease(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the image's root file system is made of packages with the owners they have")
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		t.Skipf("needs Debian: %v", err)
	}
	for _, program := range []string{"skopeo", "docker-registry"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("needs the Debian package %s: %v", program, err)
		}
	}
	rootfs, err := packages()
	if err != nil {
		t.Fatal(err)
	}
	// For another machine, kproxy is built beside the tests (test/run.sh): that takes minutes.
	t.Setenv("KPROXY_ARCHITECTURES", runtime.GOARCH)
	roots := t.TempDir()
	if err := os.Symlink(rootfs, roots+"/"+runtime.GOARCH); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KPROXY_ROOTFS", roots)
	t.Setenv("VERSION", "v0.0.0-test")
	t.Setenv("IMAGE", startRegistry(t)+"/kproxy")
	dir := t.TempDir()
	var sums [2][]byte
	for i := range sums {
		if err := run(folder+"/release.sh", dir); err != nil {
			t.Fatal(err)
		}
		if sums[i], err = os.ReadFile(dir + "/SHA256SUMS"); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(sums[0]), string(sums[1])); diff != "" {
		t.Errorf("the same commit makes another release (-first +second):\n%s", diff)
	}
	if out, err := command(dir, "sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"); err != nil {
		t.Errorf("checksums: %v\n%s", err, out)
	}
	binary := dir + "/kproxy-v0.0.0-test-linux-" + runtime.GOARCH
	checkBinary(t, binary)
	if out, err := command(dir, binary, "version"); err != nil || !strings.Contains(out, "v0.0.0-test") {
		t.Errorf("kproxy version: %v\n%s", err, out)
	}
	checkPlugin(t, dir, binary)
	if out, err := command(dir, "tar", "-xzOf", "kproxy-chart-v0.0.0-test.tgz", "kproxy/Chart.yaml", "kproxy/base/daemonset.yaml"); err != nil ||
		!strings.Contains(out, "version: 0.0.0-test\nappVersion: \"v0.0.0-test\"\n") || !strings.Contains(out, "kind: DaemonSet") {
		t.Errorf("the chart isn't this release's: %v\n%s", err, out)
	}
	chart := exec.Command("go", "test", "-mod=mod", "-vet=off", "-count=1", "-run=^TestValues$", ".")
	chart.Dir, chart.Env = root+"/test/helm", append(os.Environ(), "CGO_ENABLED=0", "KPROXY_CHART="+dir+"/kproxy-chart-v0.0.0-test.tgz")
	if out, err := chart.CombinedOutput(); err != nil {
		t.Errorf("the released chart: %v\n%s", err, out)
	}
	digests := checkNames(t, dir)
	checkPublish(t, dir, digests)
	checkPush(t, dir, digests)
	checkImage(t, dir+"/kproxy-v0.0.0-test-image-linux-"+runtime.GOARCH, "iptables")
	checkImage(t, dir+"/kproxy-v0.0.0-test-image-nftables-linux-"+runtime.GOARCH)
}

// checkNames: what is applied names the image by the digest by which the registry will know it: that of the index that is pushed,
// which leads to the image of each processor. It returns both images' digests.
func checkNames(t *testing.T, dir string) (digests []string) {
	t.Helper()
	for _, suffix := range []string{"", "-nftables"} {
		layout := t.TempDir()
		if err := run("tar", "-xf", dir+"/kproxy-v0.0.0-test-image"+suffix+".tar", "-C", layout); err != nil {
			t.Fatal(err)
		}
		var top, index struct{ Manifests []descriptor }
		readJSON(t, layout+"/index.json", &top)
		readJSON(t, blobOf(t, layout, top.Manifests[0]), &index)
		digests = append(digests, top.Manifests[0].Digest)
		for _, m := range index.Manifests {
			if m.Platform != (platform{"linux", runtime.GOARCH}) || len(index.Manifests) != 1 {
				t.Errorf("the index is %+v", index)
			}
			blobOf(t, layout, m)
		}
	}
	want := os.Getenv("IMAGE") + "@" + digests[0]
	files, err := filepath.Glob(dir + "/kproxy-*.yaml")
	if err != nil || len(files) != 3 { // kubeadm, trial and of the folder itself
		t.Errorf("manifests: %q, %v", files, err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		images := imageLine.FindAllStringSubmatch(string(text), -1)
		if len(images) < 2 || !strings.Contains(string(text), "kind: DaemonSet") || slices.ContainsFunc(images, func(m []string) bool { return m[1] != want }) {
			t.Errorf("%s names the images %q, want %s", name, images, want)
		}
	}
	if out, err := command(dir, "tar", "-xzOf", "kproxy-chart-v0.0.0-test.tgz", "kproxy/values.yaml"); err != nil ||
		!strings.Contains(out, "  repository: "+os.Getenv("IMAGE")+"\n") || !strings.Contains(out, "  digest: "+digests[0]+"\n") {
		t.Errorf("the chart names another image: %v\n%s", err, out)
	}
	return digests
}

var imageLine = regexp.MustCompile(`(?m)^\s+image: (.*)$`)

// platform is an image's in an index.
type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
}

// command runs a program in a directory and returns all it printed.
func command(dir, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// checkBinary: a binary is static, and its SBOM names the modules that are in it.
func checkBinary(t *testing.T, name string) {
	t.Helper()
	f, err := elf.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Errorf("%s isn't static", name)
	}
	info, err := buildinfo.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go")}
	for _, m := range info.Deps {
		want = append(want, fmt.Sprintf("pkg:golang/%s@%s", m.Path, m.Version))
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, components(t, name+".cdx.json")); diff != "" {
		t.Errorf("modules in %s (-binary +SBOM):\n%s", name, diff)
	}
}

// checkPlugin does with krew's manifest what krew does: takes the archive of this platform by its name and checksum, and
// runs what it names, which has to be the binary of the release.
func checkPlugin(t *testing.T, dir, binary string) {
	t.Helper()
	text, err := os.ReadFile(dir + "/kproxy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Metadata   struct {
			Name string `json:"name"`
		} `json:"metadata"`
		Spec struct {
			Version          string `json:"version"`
			Homepage         string `json:"homepage"`
			ShortDescription string `json:"shortDescription"`
			Description      string `json:"description"`
			Platforms        []struct {
				Selector meta.LabelSelector `json:"selector"`
				URI      string             `json:"uri"`
				SHA256   string             `json:"sha256"`
				Bin      string             `json:"bin"`
			} `json:"platforms"`
		} `json:"spec"`
	}
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatalf("krew's manifest: %v", err)
	}
	want := map[string]string{"os": "linux", "arch": runtime.GOARCH}
	if m.Kind != "Plugin" || m.Metadata.Name != "kproxy" || m.Spec.Version != "v0.0.0-test" || len(m.Spec.Platforms) != 1 || !maps.Equal(m.Spec.Platforms[0].Selector.MatchLabels, want) {
		t.Fatalf("krew's manifest is\n%s", text)
	}
	p := m.Spec.Platforms[0]
	archive := filepath.Join(dir, path.Base(p.URI))
	content, err := os.ReadFile(archive)
	if sum := sha256.Sum256(content); err != nil || hex.EncodeToString(sum[:]) != p.SHA256 {
		t.Errorf("%s hasn't the checksum in krew's manifest: %v", archive, err)
	}
	installed := t.TempDir()
	if err := run("tar", "-xzf", archive, "-C", installed); err != nil {
		t.Fatal(err)
	}
	if err := run("cmp", binary, filepath.Join(installed, p.Bin)); err != nil {
		t.Error(err)
	}
	if out, err := command(installed, "./"+p.Bin, "--help"); err != nil || !strings.Contains(out, "all nodes of a cluster") {
		t.Errorf("%s isn't the plugin: %v\n%s", p.Bin, err, out)
	}
}

// unzipped returns the digest of what a layer is of.
func unzipped(t *testing.T, layer string) string {
	t.Helper()
	f, err := os.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, z); err != nil {
		t.Fatal(err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// components are the package URLs in a bill of materials.
func components(t *testing.T, name string) (out []string) {
	t.Helper()
	var bom struct {
		Format     string `json:"bomFormat"`
		Components []struct {
			PURL string `json:"purl"`
		} `json:"components"`
	}
	readJSON(t, name, &bom)
	if bom.Format != "CycloneDX" {
		t.Errorf("%s is of format %q", name, bom.Format)
	}
	for _, c := range bom.Components {
		out = append(out, c.PURL)
	}
	slices.Sort(out)
	return out
}

func readJSON(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("read %s: %v", name, err)
	}
}

// descriptor refers to a blob of an OCI layout.
type descriptor struct {
	Digest   string   `json:"digest"`
	Size     int64    `json:"size"`
	Platform platform `json:"platform"` // in an index
}

// blobOf returns the file that a descriptor refers to, which has to be what it says.
func blobOf(t *testing.T, layout string, d descriptor) string {
	t.Helper()
	path := filepath.Join(layout, "blobs", strings.ReplaceAll(d.Digest, ":", "/"))
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(content); int64(len(content)) != d.Size || "sha256:"+hex.EncodeToString(sum[:]) != d.Digest {
		t.Errorf("blob %+v has %d bytes, or another digest", d, len(content))
	}
	return path
}

// checkImage follows the image's tar as a container runtime does, and runs what is in its
// layer: kproxy, and programs.
func checkImage(t *testing.T, name string, programs ...string) {
	t.Helper()
	layout, root := t.TempDir(), t.TempDir()
	if err := run("tar", "-xf", name+".tar", "-C", layout); err != nil {
		t.Fatal(err)
	}
	blob := func(d descriptor) string { return blobOf(t, layout, d) }
	var index struct{ Manifests []descriptor }
	readJSON(t, layout+"/index.json", &index)
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	readJSON(t, blob(index.Manifests[0]), &manifest)
	var image struct {
		Config struct{ Env, Entrypoint, Cmd []string }
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	readJSON(t, blob(manifest.Config), &image)
	var docker []struct {
		Config string
		Layers []string
	}
	readJSON(t, layout+"/manifest.json", &docker)
	layer := blob(manifest.Layers[0])
	if image.RootFS.DiffIDs[0] != unzipped(t, layer) || filepath.Join(layout, docker[0].Layers[0]) != layer || filepath.Join(layout, docker[0].Config) != blob(manifest.Config) {
		t.Errorf("the manifests differ: %+v, %+v, %+v", image, manifest, docker)
	}
	for keyword, want := range map[string]any{"ENTRYPOINT ": image.Config.Entrypoint, "CMD ": image.Config.Cmd} {
		if text, err := json.Marshal(want); err != nil || !slices.Contains(dockerfile(t), keyword+string(text)) {
			t.Errorf("the Dockerfile has no %s%s", keyword, text)
		}
	}
	if want := "ENV " + image.Config.Env[0]; !slices.Contains(dockerfile(t), want) {
		t.Errorf("the Dockerfile has no %q", want)
	}
	if err := run("tar", "-xf", layer, "-C", root); err != nil {
		t.Fatal(err)
	}
	commands := [][]string{append(slices.Clone(image.Config.Entrypoint), "version"), {"/usr/local/bin/kubectl-kproxy", "version"}}
	for _, p := range programs {
		commands = append(commands, []string{"/usr/sbin/" + p, "--version"})
	}
	for _, words := range commands {
		if out, err := exec.Command("chroot", append([]string{root}, words...)...).CombinedOutput(); err != nil || !bytes.Contains(out, []byte("v")) {
			t.Errorf("%v in the image: %v\n%s", words, err, out)
		}
	}
	want := []string{"pkg:golang/k8s.io/client-go@"}
	for _, p := range programs {
		want = append(want, "pkg:deb/debian/"+p+"@")
	}
	purls := components(t, name+".cdx.json")
	for _, w := range want {
		if !slices.ContainsFunc(purls, func(p string) bool { return strings.HasPrefix(p, w) }) {
			t.Errorf("the image's bill of materials lacks %s: %q", w, purls)
		}
	}
	if debian := slices.ContainsFunc(purls, func(p string) bool { return strings.HasPrefix(p, "pkg:deb/") }); debian != (len(programs) > 0) {
		t.Errorf("the image's bill of materials has Debian packages: %v, with programs %q", debian, programs)
	}
}
