package deploy

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// checkPublish: publish.sh would push and sign the images by these digests, the chart, and the checksums.
func checkPublish(t *testing.T, dir string, digests []string) {
	t.Helper()
	t.Setenv("LC_ALL", "C") // in which files are sorted
	out, err := command(".", folder+"/publish.sh", "--check", dir)
	if err != nil {
		t.Fatalf("publish.sh --check: %v\n%s", err, out)
	}
	name, images := os.Getenv("IMAGE"), dir+"/kproxy-v0.0.0-test-image"
	charts := strings.TrimSuffix(name, "/kproxy") + "/charts"
	var want []string
	var provenance strings.Builder
	for i, suffix := range []string{"", "-nftables"} {
		want = append(want,
			"skopeo copy --all --preserve-digests oci-archive:"+images+suffix+".tar docker://"+name+":v0.0.0-test"+suffix,
			"cosign sign --yes "+name+"@"+digests[i],
			"cosign attest --yes --type cyclonedx --predicate "+images+suffix+"-linux-"+runtime.GOARCH+".cdx.json "+name+"@"+digests[i])
		fmt.Fprintf(&provenance, "%s  %s:v0.0.0-test%s\n", strings.TrimPrefix(digests[i], "sha256:"), name, suffix)
	}
	files, err := filepath.Glob(dir + "/*")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want,
		"helm push "+dir+"/kproxy-chart-v0.0.0-test.tgz oci://"+charts,
		"cosign sign --yes "+charts+"/kproxy@DIGEST",
		"cosign sign-blob --yes --bundle "+dir+"/SHA256SUMS.sigstore.json "+dir+"/SHA256SUMS",
		"gh release create v0.0.0-test --verify-tag --title v0.0.0-test --notes-file "+dir+"/NOTES.md --prerelease "+strings.Join(files, " "))
	if diff := cmp.Diff(strings.Join(want, "\n")+"\n", out); diff != "" {
		t.Errorf("publish.sh runs (-want +got):\n%s", diff)
	}
	if text, err := os.ReadFile(dir + "/kproxy-images.sha256"); err != nil || string(text) != provenance.String() {
		t.Errorf("provenance is attested for %q, %v, want %q", text, err, provenance.String())
	}
}

// startRegistry runs a registry on loopback until the test's end, and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address, config := free.Addr().String(), filepath.Join(t.TempDir(), "registry.yml")
	text := fmt.Sprintf("version: 0.1\nstorage: {inmemory: {}}\nhttp: {addr: %q}\n", address)
	cmd := exec.Command("docker-registry", "serve", config)
	if err := errors.Join(free.Close(), os.WriteFile(config, []byte(text), 0o644), cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // says that it was killed
	})
	return address
}

// checkPush runs publish.sh with a skopeo that pushes, and others' programs that do nothing: the registry knows the images by
// these digests.
func checkPush(t *testing.T, dir string, digests []string) {
	t.Helper()
	home := t.TempDir()
	address, name, _ := strings.Cut(os.Getenv("IMAGE"), "/")
	insecure := fmt.Sprintf("[[registry]]\nlocation = %q\ninsecure = true\n", address)
	if err := errors.Join(os.MkdirAll(home+"/.config/containers", 0o755), os.WriteFile(home+"/.config/containers/registries.conf", []byte(insecure), 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"cosign", "helm", "gh"} {
		if err := os.Symlink("/bin/true", filepath.Join(home, program)); err != nil {
			t.Fatal(err)
		}
	}
	if err := run("env", "HOME="+home, "PATH="+home+":"+os.Getenv("PATH"), "REGISTRY_AUTH_FILE="+home+"/auth.json", "REGISTRY_USER=user", "GH_TOKEN=token",
		folder+"/publish.sh", dir); err != nil {
		t.Fatal(err)
	}
	for i, suffix := range []string{"", "-nftables"} {
		ask, err := http.NewRequestWithContext(t.Context(), http.MethodHead, "http://"+address+"/v2/"+name+"/manifests/v0.0.0-test"+suffix, nil)
		if err != nil {
			t.Fatal(err)
		}
		ask.Header.Set("Accept", "application/vnd.oci.image.index.v1+json")
		answer, err := http.DefaultClient.Do(ask)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if got := answer.Header.Get("Docker-Content-Digest"); got != digests[i] {
			t.Errorf("the registry knows %s%s by %q, want %s", name, suffix, got, digests[i])
		}
	}
}
