package kerneltest

import (
	"os/exec"
	"strings"
	"testing"
)

// Ipvsadm is what `ipvsadm -Ln` prints, without its headings and its counts of
// connections, and with one space where it has some to make columns.
func Ipvsadm(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("ipvsadm", "-Ln").CombinedOutput()
	if err != nil {
		t.Fatalf("ipvsadm -Ln: %v\n%s", err, out)
	}
	var b strings.Builder
	for i, line := range strings.Split(strings.TrimSuffix(string(out), "\n"), "\n") {
		words := strings.Fields(line)
		switch {
		case i < 3: // "IP Virtual Server version …", and two lines of headings
			continue
		case len(words) == 6 && words[0] == "->":
			b.WriteString("  ")
			words = words[:4]
		}
		b.WriteString(strings.Join(words, " ") + "\n")
	}
	return b.String()
}
