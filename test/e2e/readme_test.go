package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kproxy.dev/kproxy/plan"
)

// TestReadme follows README's "Try it on this machine" by its own text, with a Service, endpoints and clients of one's own.
func TestReadme(t *testing.T) {
	t.Parallel()
	l := newTourLab(t, plan.ModeAuto, plan.None)
	root, dir := absolute(t, "../.."), t.TempDir()
	l.must(os.Mkdir(dir+"/manifests", 0o755))
	l.must(os.Mkdir(dir+"/bin", 0o755))
	l.must(os.Symlink(absolute(t, binary), dir+"/bin/kproxy"))
	write(t, dir+"/manifests/web.yaml", `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 9000}]
endpoints: [{addresses: [10.2.0.2]}]
`)
	l.sh(`set -e
		mount -t tmpfs tmpfs /var/lib
		for i in 1 2; do
			ip netns add own$i && ip link add own$i type veth peer name eth0 netns own$i
			ip address add 10.$i.0.1/24 dev own$i && ip -n own$i address add 10.$i.0.2/24 dev eth0
			ip link set own$i up && ip -n own$i link set eth0 up && ip -n own$i route add default via 10.$i.0.1
		done`)
	endpoint := l.inside("exec ip netns exec own2 socat TCP-LISTEN:9000,fork,reuseaddr EXEC:hostname")
	l.must(endpoint.Start())
	t.Cleanup(func() { endpoint.Process.Kill() })
	prelude := "cd " + dir + `
		sudo() { exec "$@"; }
		make() { command make --dry-run -C ` + root + ` "$@"; } # it is built
		xdg-open() { curl -sf "$1"; } # there is no screen
		`
	onScreen := func(command string, want ...string) {
		l.screen = startTTY(t, l.waits, 110, 45, l.inside("export TERM=xterm LC_ALL=C.UTF-8 NO_COLOR=1\n"+prelude+command))
		l.screen.shows(want...)
		l.screen.press("q")
		l.screen.left("q")
		l.nothingLeft()
	}
	runs := l.inside(prelude)
	said := &logWriter{}
	runs.Stdout, runs.Stderr = said, said
	t.Cleanup(func() {
		if runs.Process != nil {
			runs.Process.Kill()
		}
	})
	for _, line := range readmeLines(t, root, "Try it on this machine") {
		command, _, _ := strings.Cut(line, " #")
		switch words := " " + command + " "; {
		case strings.Contains(words, " lab up "):
			onScreen(command, "● alive", "the client's last second: ", "try in another terminal: 1 of ")
		case strings.Contains(words, " lab lesson "):
			onScreen(command, "try in another terminal: 1 of ")
		case strings.Contains(words, " lab compare "): // a smaller one: TestCompare has all of it
			l.matches(l.sh(prelude+command+" --repeat 1 --services 2 --planes userspace"), `(userspace)`)
		case strings.Contains(words, " run "):
			runs.Args[len(runs.Args)-1] += command
			l.must(runs.Start())
			l.eventually("kproxy to be ready", func() error { return missing(l.try(prelude+"bin/kproxy status --wait"), "default/web ") })
		case strings.Contains(words, " cleanup "): // after Ctrl-C
			l.must(runs.Process.Signal(os.Interrupt))
			if err := runs.Wait(); err != nil {
				t.Errorf("kproxy run ends with %v: %s", err, said)
			}
			l.matches(l.sh(prelude+command), `(everything kproxy programmed is gone)`)
		case strings.Contains(words, " trace "):
			l.matches(l.sh(prelude+command), `^(FORWARDED)`)
		default:
			l.sh(prelude + command)
		}
	}
	if runs.ProcessState == nil {
		t.Error("README doesn't run kproxy, or doesn't remove what it programmed")
	}
}

// readmeLines returns the lines of README's blocks below a heading.
func readmeLines(t *testing.T, root, heading string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range regexp.MustCompile("(?s)\n```\n(.*?)\n```\n").FindAllStringSubmatch(section, -1) {
		lines = append(lines, strings.Split(m[1], "\n")...)
	}
	return lines
}
