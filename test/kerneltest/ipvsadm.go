package kerneltest

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Ipvsadm returns what `ipvsadm -Ln` prints, without its headings and its counts of
// connections, with one space where it has some to make columns, and sorted by
// [SortServers]: its own order isn't one (ipvs_cmp_services of its libipvs takes
// the difference of two addresses for a signed number).
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
	return SortServers(b.String())
}

// SortServers brings virtual servers, each with its real servers, in order of text.
func SortServers(text string) string {
	var servers []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, " ") && len(servers) > 0 {
			servers[len(servers)-1] += line
		} else {
			servers = append(servers, line)
		}
	}
	slices.Sort(servers)
	return strings.Join(servers, "")
}
