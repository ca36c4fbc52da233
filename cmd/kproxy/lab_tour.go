package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/lesson"
	"kproxy.dev/kproxy/plan"
)

// Files of a lab, for those who try things in it.
const (
	labSocket = labDir + "/kproxy.sock"
	labPID    = labDir + "/kproxy.pid"   // of kproxy itself
	labStart  = labDir + "/start-kproxy" // a script that starts it again
	labAsk    = labDir + "/ask"          // a script that connects as the client
	labPod    = labDir + "/replace-pod"  // a script that has an endpoint not ready for a moment
	labTour   = labDir + "/tour.txt"
	labHeard  = labDir + "/answers" // what labAsk got
)

// tour describes a running lab to the text of what there is to try in it: each task says what to look
// for. A test runs its commands.
type tour struct {
	Self      string // how to call this program
	named     bool   // commands must name the lab's socket: a kproxy runs on this host, too
	Mode      plan.Mode
	Fallback  plan.DataPlane // the kernel data plane; empty for none
	Tables    bool           // kproxy programs tables of nftables' own
	Servers   string         // a command that shows virtual servers; empty where there are none
	Dashboard string
	Manifest  string // file of the service
	Backends  int
	Alive     time.Duration
}

// newTour describes a lab that runs.
func (s *labSession) newTour(st plan.Status) tour {
	t := tour{Self: s.proxy.Path, named: listens(defaultSocket), Mode: st.Mode, Manifest: s.manifest.Path(s.manifests), Backends: len(s.net.Backends), Alive: s.pace.aliveTimeout()}
	for _, svc := range st.Services {
		if svc.Kernel != plan.None {
			t.Fallback = cmp.Or(svc.Kernel, t.Fallback)
			t.Servers = cmp.Or(virtualServers(&svc), t.Servers)
		}
	}
	t.Tables = slices.ContainsFunc(st.Capabilities, func(c plan.Capability) bool { return c.Name == string(plan.NFTables) && c.Supported })
	if host, ok := s.net.HostAddress(); ok {
		t.Dashboard = fmt.Sprintf("http://%s:10249/", host)
	}
	return t
}

// Kproxy returns a command to the lab's kproxy.
func (t tour) Kproxy(command string) string {
	words := t.Self + " " + command
	if t.named {
		words += " --socket " + labSocket
	}
	return words
}

// Expired returns after how many seconds the heartbeat of a kproxy that has died has surely run out.
func (t tour) Expired() int { return int((t.Alive + 2*time.Second).Seconds()) }

// askScript is the client in the lab: bash opens TCP connections itself.
const askScript = `#!/bin/sh
# Connects to HOST PORT as the lab's client, sends a line, and prints the answer:
# the backend's name, the address that it saw, and the line. The tour reads the answer, too.
answer=$(ip netns exec %s timeout "${WITHIN:-5}" bash -c 'exec 3<>"/dev/tcp/$0/$1" && echo hello >&3 && head -n 1 <&3' "$1" "$2") && test -n "$answer" || exit 1
echo "$answer" | tee -a %s
`

// podScript does to an endpoint what Kubernetes does while it replaces a pod.
const podScript = `#!/bin/sh
# Has the endpoint %[1]s not ready for a second, as while Kubernetes replaces its pod.
for ready in false true; do
  sed -i '/"%[1]s"/,/ready:/s/ready: .*/ready: '$ready'/' %[2]s
  sleep 1
done
`

func onNode(command string) string {
	return fmt.Sprintf("ip netns exec %s-node %s", lab.DefaultPrefix, command)
}

// virtualServers is a command that shows those of the node: where a data plane has
// schedulers, it has virtual servers.
func virtualServers(s *plan.ServiceStatus) string {
	if s.Scheduler == "" {
		return ""
	}
	if _, err := exec.LookPath("ipvsadm"); err == nil {
		return onNode("ipvsadm -Ln")
	}
	return onNode("cat /proc/net/ip_vs")
}

// tourText is the tour as it is printed and written to a file.
func tourText(tasks []lesson.Task) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Things to try in another terminal, as root (this is also in %s):\n", labTour)
	for i, t := range tasks {
		fmt.Fprintf(&b, "\n%d. %s\n", i+1, t.Title)
		for _, c := range t.Commands {
			fmt.Fprintf(&b, "     $ %s\n", c)
		}
		for _, part := range screen.Wrap("Look for: "+t.Look, 76, 20) {
			fmt.Fprintf(&b, "   %s\n", part)
		}
	}
	return b.String()
}

// writeTour returns what there is to try in the lab, and writes that and the commands that it and lessons are about.
func (s *labSession) writeTour(st plan.Status) ([]lesson.Task, error) {
	t := s.newTour(st)
	tasks, err := lesson.Tour(t)
	script := fmt.Sprintf("#!/bin/sh\n# Starts the lab's kproxy again, in this terminal.\necho $$ > %s\nexec ip netns exec %s %s", labPID, s.net.Node.Name, quote(s.proxy.Path))
	for _, a := range s.proxy.Args {
		script += " " + quote(a)
	}
	return tasks, errors.Join(
		err, s.writeBin(),
		os.WriteFile(labPID, fmt.Appendln(nil, s.proxy.PID()), 0o644),
		os.WriteFile(labStart, []byte(script+"\n"), 0o755),
		os.WriteFile(labAsk, fmt.Appendf(nil, askScript, s.net.Client.Name, labHeard), 0o755),
		os.WriteFile(labPod, fmt.Appendf(nil, podScript, s.net.Backends[0].Address(false, lab.LinePort).Addr(), t.Manifest), 0o755),
		os.WriteFile(labTour, []byte(tourText(tasks)), 0o644),
	)
}

// quote makes one word of s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
