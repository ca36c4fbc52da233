package handover

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the generated file")

// TestGenerated compares the generated file with what protoc makes of the messages.
func TestGenerated(t *testing.T) {
	if _, err := exec.LookPath("protoc"); err != nil {
		t.Skip("skipped: needs protoc (test/setup.sh test)")
	}
	dir := t.TempDir()
	plugin := filepath.Join(dir, "protoc-gen-go")
	run(t, "go", "build", "-o", plugin, "google.golang.org/protobuf/cmd/protoc-gen-go")
	run(t, "protoc", "--plugin", plugin, "--go_out", dir, "--go_opt", "paths=source_relative", "handover.proto", "takeover.proto")
	for _, file := range []string{"handover.pb.go", "takeover.pb.go"} {
		want := read(t, filepath.Join(dir, file))
		if *update {
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		version := regexp.MustCompile(`(?m)^// \tprotoc .*$`) // Debian's releases have different ones
		if !bytes.Equal(version.ReplaceAll(want, nil), version.ReplaceAll(read(t, file), nil)) {
			t.Errorf("%s isn't what protoc makes of its messages: go test ./handover -update", file)
		}
	}
}

func run(t *testing.T, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
