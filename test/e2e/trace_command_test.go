package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// TestTraceCommand: a service can be named or addressed, the answer comes first and
// within 80 columns, JSON has the names of the API, which never probes; and what
// can't be asked ends with status 2 and says how to ask.
func TestTraceCommand(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferUserspace)
	at, socket := frontends(m)[0].String(), w.socket()
	client := w.net.Config.ClientAddresses(0)[0].String()

	byAddress, byName := w.node(binary, "trace", "--socket", socket, "--from", client, at), w.node(binary, "trace", "--socket", socket, "--from", client, "default/web:line")
	for _, out := range []string{byAddress, byName} {
		if !strings.HasPrefix(out, "FORWARDED  tcp "+at) || !strings.Contains(out, "carried by userspace") || strings.Contains(out, "\x1b") {
			t.Errorf("the answer doesn't come first, or with colours:\n%s", out)
		}
		for line := range strings.Lines(out) {
			if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 80 {
				t.Errorf("more than 80 columns: %s", line)
			}
		}
	}
	var r trace.Result
	w.must(json.Unmarshal([]byte(w.node(binary, "trace", "--socket", socket, "-o", "json", "--from", w.net.Config.ClientAddresses(0)[1].String(), frontends(m)[1].String())), &r))
	if r.Verdict != trace.Forwarded || r.Service != "default/web:line" || r.Kind != "cluster IP" || r.DataPlane != plan.Userspace || len(r.Candidates) != 3 {
		t.Errorf("over IPv6: %+v", r)
	}
	for _, c := range []struct {
		args  []string
		words []string
	}{
		{[]string{"10.96.0.10"}, []string{"10.96.0.10", "ADDRESS:PORT"}},
		{[]string{}, []string{"ADDRESS:PORT"}},
		{[]string{"--proto", "sctp", at}, []string{"sctp", "udp"}},
		{[]string{"--from", "web", at}, []string{"--from", "web"}},
		{[]string{"--from", "fd00::2", at}, []string{"address family"}},
		{[]string{"-o", "xml", at}, []string{"xml", "json"}},
		{[]string{"default/nosuch"}, []string{"default/nosuch"}},
		{[]string{"--probe", "--from", "10.1.0.77", at}, []string{"10.1.0.77", "neither an address of this node", "--netns"}},
		{[]string{"--from-pod", "nosuch", at}, []string{"nosuch", "--netns"}},
		{[]string{"--netns", "nosuch", at}, []string{"/run/netns/nosuch"}},
		{[]string{"--from-pod", "a", "--netns", "b", at}, []string{"--from-pod"}},
	} {
		w.kproxy("trace", append([]string{"--socket", socket}, c.args...)...).wants(t, 2, c.words...)
	}
	finish(w.T, w.net.Node, asNobody(t, command(t, "trace", at))).wants(t, 3, "kernel alone", "root")
	for _, args := range [][]string{{"--socket", "/nosuch", at}, {"--probe", at}} {
		w.kproxy("trace", args...).wants(t, 1, "nothing was traced", "nsenter")
	}
	w.apiTraces(t, at)
}

// apiTraces: the API traces, and doesn't probe.
func (w *world) apiTraces(t *testing.T, at string) {
	t.Helper()
	web := w.net.Node.HTTPClient(within(30 * time.Second))
	for query, code := range map[string]int{"": http.StatusOK, "&probe=true": http.StatusBadRequest} {
		resp, err := web.Get("http://127.0.0.1:10249/api/v1/trace?protocol=tcp&address=" + at + query)
		w.must(err)
		var r trace.Result
		err = json.NewDecoder(resp.Body).Decode(&r)
		resp.Body.Close()
		if err != nil || resp.StatusCode != code || code == http.StatusOK && r.Verdict != trace.Forwarded {
			t.Errorf("api%s: %s, %+v, %v; want status %d", query, resp.Status, r.Verdict, err, code)
		}
	}
}

// TestNFTablesWarnsOfFirewalls: in mode nftables, status names the chains of others that drop by default.
func TestNFTablesWarnsOfFirewalls(t *testing.T) {
	w := newWorld(t)
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	w.start()
	if e := w.kproxy("status"); e.status != 0 || strings.Contains(e.stdout, "warning") {
		t.Errorf("without a firewall: status %d, %s", e.status, e.stdout)
	}
	w.node("iptables", "-P", "FORWARD", "DROP")
	w.node("nft", "add table inet guard; add chain inet guard fw { type filter hook input priority 10; policy drop; }; add rule inet guard fw iif lo accept")
	w.eventually(20*time.Second, "status to name the firewalls", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && len(st.Warnings) != 2 {
			err = fmt.Errorf("warnings are %q", st.Warnings)
		}
		return err
	})
	w.kproxy("status").wants(t, 0, "warning: chain FORWARD of nftables table ip filter drops what is forwarded", "warning: chain fw of nftables table inet guard drops what comes in")
}

// TestTraceProbe: a probe reaches the endpoint that trace says, in every data
// plane, by TCP and UDP, from wherever the client is, and comes with its own entry of conntrack.
func TestTraceProbe(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	pod := fmt.Sprintf("shop-%d", os.Getpid())
	sandbox := w.net.Client.Command(w.ctx, "unshare", "--uts", "sh", "-c", "hostname "+pod+"; exec sleep 600")
	w.must(sandbox.Start())
	t.Cleanup(func() {
		_ = sandbox.Process.Kill()
		_ = sandbox.Wait()
	})
	w.eventually(10*time.Second, "the pod to have its name", func() error {
		if e := w.kproxy("trace", "--socket", w.socket(), "--from-pod", pod, frontends(m)[0].String()); e.status != 0 {
			return errors.New(e.stderr)
		}
		return nil
	})
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		for _, proto := range []service.Protocol{service.TCP, service.UDP} {
			for i, at := range frontends(m) {
				client := w.net.Config.ClientAddresses(1)[i]
				for name, req := range map[string]trace.Request{
					"the node":      {},
					"a namespace":   {Netns: w.net.Client.Path()},
					"an address":    {From: client},
					"a pod by name": {Pod: pod},
				} {
					if slow > 1 && (i == 1) == (proto == service.TCP) { // a trace takes a second there
						continue
					}
					req.Address, req.Protocol, req.Probe = at, proto, true
					t.Run(fmt.Sprint(plane, " ", proto, " ", at, " from ", name), func(t *testing.T) { w.probed(t, req) })
				}
			}
		}
	}
}

func (w *world) probed(t *testing.T, req trace.Request) {
	r := w.traced(req)
	good := map[service.Protocol]string{service.TCP: "connected", service.UDP: "answered"}[req.Protocol]
	at := slices.IndexFunc(r.Candidates, func(c trace.Candidate) bool { return c.Endpoint == r.Probe.Endpoint })
	switch {
	case r.Verdict != trace.Forwarded || r.Culprit != "":
		t.Errorf("%s, %q", r.Verdict, r.Culprit)
	case r.Probe.Outcome != good:
		t.Errorf("the probe was %q, want %q", r.Probe.Outcome, good)
	case at < 0 || r.Candidates[at].Probability == 0:
		t.Errorf("the probe came to %s, which is none of the candidates %v", r.Probe.Endpoint, r.Candidates)
	case len(r.Probe.Conntrack) != 1 || !strings.Contains(r.Probe.Conntrack[0], "dst="+req.Address.Addr().String()):
		t.Errorf("its entry in conntrack: %q", r.Probe.Conntrack)
	case (req != trace.Request{Address: req.Address, Protocol: req.Protocol, Probe: true}) &&
		(r.Client == "this node itself" || !strings.Contains(r.Probe.From, "/") || !strings.Contains(r.Probe.Conntrack[0], " src="+r.From.String()+" ")):
		t.Errorf("it came from %s, %s: %q", r.Client, r.Probe.From, r.Probe.Conntrack)
	}
	if t.Failed() {
		t.Log(r.Text(trace.Look{}))
	}
}
