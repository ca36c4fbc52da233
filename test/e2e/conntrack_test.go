package e2e

import (
	"strings"
	"testing"
)

// TestConntrackSettings: what is configured of connection tracking is set, and
// what this network namespace can't set is told, and is no reason not to serve.
// Where conntrack is to be liberal, nothing is dropped for being invalid.
func TestConntrackSettings(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--conntrack-max-per-core", "7777777", "--conntrack-tcp-timeout-established", "3h", "--conntrack-tcp-timeout-close-wait", "2m",
		"--conntrack-udp-timeout", "17s", "--conntrack-udp-timeout-stream", "71s", "--conntrack-tcp-be-liberal")
	for name, want := range map[string]string{
		"tcp_timeout_established": "10800", "tcp_timeout_close_wait": "120", "udp_timeout": "17", "udp_timeout_stream": "71", "tcp_be_liberal": "1",
	} {
		if got := strings.TrimSpace(w.node("cat", "/proc/sys/net/netfilter/nf_conntrack_"+name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	st, err := w.client.Status(w.ctx)
	w.must(err)
	told := false
	for _, c := range st.Capabilities {
		told = told || strings.HasSuffix(c.Name, "nf_conntrack_max") && !c.Supported && strings.Contains(c.Reason, "it can't be set here")
	}
	if !told {
		t.Errorf("the status doesn't say that nf_conntrack_max can't be set here: %+v", st.Capabilities)
	}
	if rules := w.node("iptables-save", "-t", "filter"); strings.Contains(rules, "-j KPROXY-INVALID") {
		t.Errorf("packets are dropped although conntrack is liberal:\n%s", rules)
	}
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
	}
}
