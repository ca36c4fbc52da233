package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
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

// tour describes what there is to try in a running lab: each step says what to look
// for. A test runs its commands.
type tour struct {
	self      string // how to call this program
	named     bool   // commands must name the lab's socket: a kproxy runs on this host, too
	mode      plan.Mode
	fallback  plan.DataPlane // the kernel data plane; plan.None for none
	tables    bool           // kproxy programs tables of nftables' own
	servers   string         // a command that shows virtual servers; empty where there are none
	dashboard string
	manifest  string // file of the service
	backends  int
	alive     time.Duration
	client    *web.Client
}

// newTour describes the tour of a lab that runs.
func (s *labSession) newTour(st plan.Status) tour {
	t := tour{self: s.proxy.Path, named: listens(defaultSocket), mode: st.Mode, fallback: plan.None, manifest: s.manifest.Path(s.manifests), backends: len(s.net.Backends), alive: s.pace.aliveTimeout(), client: s.client}
	for _, svc := range st.Services {
		if svc.Kernel != "" && svc.Kernel != plan.None {
			t.fallback, t.servers = svc.Kernel, virtualServers(&svc)
		}
	}
	t.tables = slices.ContainsFunc(st.Capabilities, func(c plan.Capability) bool { return c.Name == string(plan.NFTables) && c.Supported })
	if host, ok := s.net.HostAddress(); ok {
		t.dashboard = fmt.Sprintf("http://%s:10249/", host)
	}
	return t
}

// kproxy is a command to the lab's kproxy.
func (t *tour) kproxy(command, args string) string {
	words := []string{t.self, command}
	if t.named {
		words = append(words, "--socket", labSocket)
	}
	return strings.TrimSpace(strings.Join(append(words, args), " "))
}

// ask sends a line to an address, as the lab's client.
func ask(host string, port int) string { return fmt.Sprintf("%s %s %d", labAsk, host, port) }

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

// steps are the tour, as this lab's mode allows.
func (t *tour) steps() []guideStep {
	steps := []guideStep{{Step: screen.Step{
		Title: "Be a client", Commands: []string{ask(labService.Addr().String(), int(labService.Port()))},
		Look: "a backend's name, such as b1, and 10.1.0.2, the address it saw: the client's own. Repeat it: the backends take turns.",
	}, check: heard}}
	if t.fallback != plan.None {
		steps = append(steps, t.planes()...)
	}
	steps = append(steps, t.rules())
	if t.backends > 1 {
		onBackend, refuse, accept := "ip netns exec "+lab.DefaultPrefix+"-b2 ", "iptables -I INPUT -p tcp -j REJECT --reject-with tcp-reset", "iptables -D INPUT -p tcp -j REJECT --reject-with tcp-reset"
		if t.tables {
			refuse, accept = "nft 'table ip dead { chain input { type filter hook input priority 0; meta l4proto tcp reject with tcp reset; }; }'", "nft delete table ip dead"
		}
		steps = append(steps, guideStep{Step: screen.Step{
			Title: "Kill a backend",
			Commands: []string{
				onBackend + refuse,
				t.kproxy("status", "-o wide default/web:line"),
				onBackend + accept,
			},
			Look: "10.2.0.3 goes down after two failed checks, within two seconds, and gets no new connections: the traffic goes to the others. After the last command it comes back.",
		}, check: t.happened([]string{"10.2.0.3:9000 is down", "10.2.0.3:9000 is up"}, "10.2.0.3 to go down, and come back")})
	}
	steps = append(steps, guideStep{Step: screen.Step{
		Title:    "Edit a manifest",
		Commands: []string{fmt.Sprintf("sed -i 's/nodePort: 30080/nodePort: 30090/' %s", t.manifest), ask("10.1.0.1", 30090)},
		Look:     "the file is watched: the node answers on its new port at once. Edit it with an editor and break it on purpose: the status names file and line, and what was valid stays in force.",
	}, check: t.line("another node port", func(s *plan.ServiceStatus) (bool, string) {
		return s.NodePort != 30080, fmt.Sprintf("the node port is %d", s.NodePort)
	})})
	if t.dashboard != "" {
		steps = append(steps, guideStep{Step: screen.Step{
			Title: "Open the dashboard in a browser", Commands: []string{"curl -s " + t.dashboard + "api/v1/status"}, Question: true,
			Look: t.dashboard + " has the same services, live; it only reads. The command shows what programs get. Which generation of its rules is in force (sync, generation)?",
		}, check: func(ctx context.Context, _ time.Time, answer string) (bool, string) {
			st, err := t.client.Status(ctx)
			if err != nil {
				return false, err.Error()
			}
			n, err := strconv.ParseUint(answer, 10, 64)
			if err != nil || n == 0 || n > st.Sync.Generation {
				return false, fmt.Sprintf("%q isn't it: look for \"generation\" in what the command prints", answer)
			}
			return true, fmt.Sprintf("generation %d; each change that takes effect counts one", n)
		}})
	}
	return append(steps, t.kill(), guideStep{Step: screen.Step{
		Title: "Compare the data planes", Commands: []string{t.self + " lab compare --quick"},
		Look: "the same work through every data plane that this host has, and without a proxy as the limit: how many connections a second, how long requests take, how much CPU they cost. The page has charts.",
	}, check: compared()})
}

// planes are the way into userspace and back to the kernel.
func (t *tour) planes() []guideStep {
	return []guideStep{{Step: screen.Step{
		Title:    "Pin the service to userspace, and see each connection",
		Commands: []string{t.kproxy("pin", "default/web:line userspace"), t.kproxy("connections", "default/web:line")},
		Look:     "state pinned. New connections are kproxy's own: it knows the age of each. Those that the kernel carries already go on in " + string(t.fallback) + " until they end. Most last a millisecond; the client keeps three open for 9 seconds each.",
	}, check: t.line("state pinned, in userspace", func(s *plan.ServiceStatus) (bool, string) {
		return s.State == plan.StatePinned && s.DataPlane == plan.Userspace, fmt.Sprintf("it is %s in %s", s.State, s.DataPlane)
	})}, {Step: screen.Step{
		Title:    "Watch the offload happen",
		Commands: []string{labPod, t.kproxy("pin", "default/web:line auto"), t.kproxy("status", "default/web:line")},
		Look:     "state qualifying, with a countdown: b1 has just been away and come back, as a pod does that is replaced, and a service must have been steady for 10 seconds. Then the data plane is " + string(t.fallback) + ", connections go through the kernel alone, and no exchange of the traffic failed on the way.",
	}, check: t.happened([]string{"userspace to " + string(t.fallback)}, "the offload")}}
}

// rules is about what is in the kernel.
func (t *tour) rules() guideStep {
	list, all := "iptables-save -c -t nat", "all of the rules that kproxy made: their chains begin with KPROXY-."
	if t.tables {
		list, all = "nft list table ip kproxy", "all that kproxy made: a service is an element of maps."
	}
	step := screen.Step{
		Title: "Read the rules", Question: true,
		Commands: []string{t.kproxy("trace", "--from 10.1.0.2 "+labService.String()), onNode(list)},
		Look:     "trace follows a packet of the client through what is really in the kernel, rule by rule with its counters, to each endpoint and how likely it is. The second command shows " + all,
	}
	switch {
	case t.servers != "":
		step.Commands = append(step.Commands, t.servers)
		step.Look += " The third shows the virtual servers: the address, the scheduler, and the real servers it chooses among."
	case t.fallback == plan.None:
		step.Look += " In mode userspace they do only one thing: bring packets to kproxy."
	}
	step.Look += " How many endpoints does the trace lead to?"
	return guideStep{Step: step, check: func(ctx context.Context, _ time.Time, answer string) (bool, string) {
		res, err := t.client.Trace(ctx, trace.Request{Address: labService, Protocol: service.TCP, From: labClient})
		switch {
		case err != nil:
			return false, err.Error()
		case answer != strconv.Itoa(len(res.Candidates)):
			return false, fmt.Sprintf("%q isn't it: count them in what the trace prints", answer)
		}
		return true, fmt.Sprintf("the trace leads to %s endpoints", answer)
	}}
}

// labClient is the address of the lab's client.
var labClient = netip.MustParseAddr("10.1.0.2")

// heard looks for an answer that the lab's client got since then.
func heard(_ context.Context, since time.Time, _ string) (bool, string) {
	info, err := os.Stat(labHeard)
	if err != nil || info.ModTime().Before(since) {
		return false, "an answer to the client"
	}
	b, err := os.ReadFile(labHeard)
	if err != nil {
		return false, err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	words := strings.Fields(lines[len(lines)-1])
	if len(words) < 2 {
		return false, "an answer to the client"
	}
	return true, fmt.Sprintf("%s answered, and saw %s", words[0], words[1])
}

// line waits until the lab's service is as ok says, which also says how it is.
func (t *tour) line(what string, ok func(*plan.ServiceStatus) (bool, string)) func(context.Context, time.Time, string) (bool, string) {
	return func(ctx context.Context, _ time.Time, _ string) (bool, string) {
		st, err := t.client.Status(ctx)
		if err != nil {
			return false, err.Error()
		}
		i := slices.IndexFunc(st.Services, func(s plan.ServiceStatus) bool { return s.Name == "web" && s.Port == "line" })
		if i < 0 {
			return false, "the service default/web:line, which isn't there"
		}
		done, how := ok(&st.Services[i])
		if !done {
			how = what + "; " + how
		}
		return done, how
	}
}

// happened waits for events of the lab's service, in their order, since the step was first shown.
func (t *tour) happened(messages []string, what string) func(context.Context, time.Time, string) (bool, string) {
	return func(ctx context.Context, since time.Time, _ string) (bool, string) {
		events, err := t.client.Timeline(ctx, "default/web:line", 200)
		if err != nil {
			return false, err.Error()
		}
		seen, said := 0, what
		for _, e := range slices.Backward(events) { // oldest first
			if seen < len(messages) && e.Time.After(since) && strings.Contains(e.Message, messages[seen]) {
				seen++
				said = e.Time.Format("15:04:05 ") + e.Message
			}
		}
		if seen < len(messages) && seen > 0 {
			said += "; now for: " + messages[seen]
		}
		return seen == len(messages), said
	}
}

// compared waits for the networks of `kproxy lab compare` to come, and to go.
func compared() func(context.Context, time.Time, string) (bool, string) {
	came := false
	return func(context.Context, time.Time, string) (bool, string) {
		there, err := filepath.Glob("/run/netns/" + lab.DefaultPrefix + "-*-node")
		came = came || err == nil && len(there) > 0
		switch {
		case !came:
			return false, "a comparison to begin"
		case len(there) > 0:
			return false, "the comparison, which runs"
		}
		return true, "the comparison has run: open its page"
	}
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

// kill is about what a proxy that has died leaves.
func (t *tour) kill() guideStep {
	later := fmt.Sprintf("sleep %d; ", int((t.alive + 2*time.Second).Seconds()))
	step := screen.Step{
		Title:    "Kill kproxy, and start it again",
		Commands: []string{"kill -9 $(cat " + labPID + ")", later + ask(labService.Addr().String(), int(labService.Port())), labStart + " >/dev/null 2>&1 &"},
		Look:     "the screen says that kproxy has gone, and the traffic goes on: the rules are in the kernel. For up to " + t.alive.String() + " they still send services of userspace to a process that isn't there; then its heartbeat in the kernel has run out, and all of them go to the fallback rules. After the last command kproxy is back and adopts what it finds.",
	}
	if t.fallback == plan.None {
		step.Commands[1] = later + t.kproxy("status", "; true")
		step.Look = "the screen says that kproxy has gone, and the traffic fails: in mode userspace every connection goes through the process, without fallback rules. The other modes differ in just that. After the last command it is back."
	}
	gone := false
	return guideStep{Step: step, check: func(ctx context.Context, _ time.Time, _ string) (bool, string) {
		_, err := t.client.Status(ctx)
		gone = gone || err != nil
		switch {
		case !gone:
			return false, "kproxy to be gone"
		case err != nil:
			return false, "kproxy is gone; now for its return"
		}
		return true, "kproxy has gone, and is back"
	}}
}

// text is the tour as it is printed and written to a file.
func (t *tour) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Things to try in another terminal, as root (this is also in %s):\n", labTour)
	for i, s := range t.steps() {
		fmt.Fprintf(&b, "\n%d. %s\n", i+1, s.Title)
		for _, c := range s.Commands {
			fmt.Fprintf(&b, "     $ %s\n", c)
		}
		for _, part := range screen.Wrap("Look for: "+s.Look, 76, 20) {
			fmt.Fprintf(&b, "   %s\n", part)
		}
	}
	return b.String()
}

// writeTour writes the files that the tour is about.
func (s *labSession) writeTour(t *tour) error {
	script := fmt.Sprintf("#!/bin/sh\n# Starts the lab's kproxy again, in this terminal.\necho $$ > %s\nexec ip netns exec %s %s", labPID, s.net.Node.Name, quote(s.proxy.Path))
	for _, a := range s.proxy.Args {
		script += " " + quote(a)
	}
	return cmp.Or(
		os.WriteFile(labPID, fmt.Appendln(nil, s.proxy.PID()), 0o644),
		os.WriteFile(labStart, []byte(script+"\n"), 0o755),
		os.WriteFile(labAsk, fmt.Appendf(nil, askScript, s.net.Client.Name, labHeard), 0o755),
		os.WriteFile(labPod, fmt.Appendf(nil, podScript, s.net.Backends[0].Address(false, lab.LinePort).Addr(), t.manifest), 0o755),
		os.WriteFile(labTour, []byte(t.text()), 0o644),
	)
}

// quote makes one word of s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
