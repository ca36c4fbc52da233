package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestCommandsThatLook: what a person sees of a running kproxy, in every form.
func TestCommandsThatLook(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(newManifest("other", 11, w.net.Backends[0]).Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferUserspace)
	inUserspace := w.hold(frontends(m)[0])
	w.pin("web", "line", service.PreferKernel)
	inKernel := w.hold(frontends(m)[1])

	t.Run("status", func(t *testing.T) { w.statusForms(t) })
	t.Run("connections", func(t *testing.T) { w.connectionForms(t, inUserspace, inKernel) })
	t.Run("connections, watched", func(t *testing.T) { w.connectionScreen(t, inUserspace, inKernel) })
	t.Run("connections, limited", func(t *testing.T) { w.connectionLimits(t) })
	t.Run("pin", func(t *testing.T) { w.pinForms(t) })
	t.Run("metrics address", func(t *testing.T) { w.metricsAddress(t, inUserspace, inKernel) })
	t.Run("healthz address", func(t *testing.T) { w.healthzAddress(t) })
}

func (w *world) statusForms(t *testing.T) {
	table := w.kproxy("status")
	table.wants(t, 0, "mode "+string(mode)+", alive", "SERVICE", "DATA PLANE", "default/web:line", "default/other:http", "10.96.0.10:80/tcp +1", "pinned to the kernel")
	if strings.Contains(table.stdout, "10.2.0.2:9000") {
		t.Errorf("the table lists endpoints, which only wide should:\n%s", table.stdout)
	}
	w.kproxy("status", "-o", "wide").wants(t, 0, "default/web:line", "10.2.0.2:9000", "[fd00:2::4]:9000", "in use", "up")
	w.kproxy("status", "--output", "toml").wants(t, 2, "toml", "table, wide, json, yaml, name")

	one := w.kproxy("status", "default/other")
	one.wants(t, 0, "default/other:line")
	if strings.Contains(one.stdout, "default/web") {
		t.Errorf("status of one service shows another:\n%s", one.stdout)
	}
	w.kproxy("status", "default/nosuch").wants(t, 1, "default/nosuch")
	w.kproxy("status", "other").wants(t, 2, "NAMESPACE/NAME")

	var st plan.Status
	if err := json.Unmarshal([]byte(w.ok(w.kproxy("status", "-o", "json"))), &st); err != nil {
		t.Fatal(err)
	}
	if !st.Alive || st.Node != "node" || st.Mode != mode || len(st.Services) != 6 || st.Sync.LastSuccess.IsZero() {
		t.Errorf("as JSON: alive %v, node %q, mode %q, %d services, last success %s", st.Alive, st.Node, st.Mode, len(st.Services), st.Sync.LastSuccess)
	}
	if len(st.Sources) != 1 || !st.Sources[0].Synced || st.Sources[0].Error != "" || len(st.Capabilities) == 0 {
		t.Errorf("as JSON: sources %v, %d capabilities", st.Sources, len(st.Capabilities))
	}
}

func (w *world) connectionForms(t *testing.T, inUserspace, inKernel *lab.Held) {
	table := w.ok(w.kproxy("connections", "default/web:line"))
	for held, plane := range map[*lab.Held]plan.DataPlane{inUserspace: plan.Userspace, inKernel: w.plane} {
		row := regexp.MustCompile(`(?m)^tcp .*` + regexp.QuoteMeta(held.LocalAddr().String()) + ` .*default/web:line .*` + string(plane))
		if !row.MatchString(table) {
			t.Errorf("no row for the connection from %s in %s:\n%s", held.LocalAddr(), plane, table)
		}
	}
	var rows []plan.ConnectionStatus
	if err := json.Unmarshal([]byte(w.ok(w.kproxy("connections", "-o", "json", "default/web"))), &rows); err != nil {
		t.Fatal(err)
	}
	found := map[string]plan.ConnectionStatus{}
	for _, r := range rows {
		found[r.Client.String()] = r
	}
	for _, h := range []*lab.Held{inUserspace, inKernel} {
		r := found[h.LocalAddr().String()]
		if r.Service != "default/web:line" || r.Address.Port() != 80 || r.Endpoint.Port() != lab.LinePort || r.BytesIn == 0 || r.BytesOut == 0 {
			t.Errorf("as JSON, the connection from %s is %+v", h.LocalAddr(), r)
		}
	}
	if out := w.ok(w.kproxy("connections", "default/other")); strings.Contains(out, "default/web") {
		t.Errorf("connections of one service show another's:\n%s", out)
	}
	w.kproxy("connections", "web").wants(t, 2, "NAMESPACE/NAME")
}

func (w *world) pinForms(t *testing.T) {
	w.kproxy("pin", "default/web:line", "userspace").wants(t, 0, "default/web:line", "userspace")
	w.await("web", "line", plan.Userspace, plan.StatePinned)
	w.kproxy("pin", "default/web:line", "kernel").wants(t, 0, "kernel")
	w.await("web", "line", w.plane, plan.StatePinned)
	w.kproxy("pin", "default/web", "userspace").wants(t, 0, "default/web:datagram", "default/web:http")
	w.await("web", "http", plan.Userspace, plan.StatePinned)
	w.kproxy("pin", "default/web", "auto").wants(t, 0, "auto")
	w.await("web", "line", w.plane, plan.StateOffloaded) // it has carried connections
	w.kproxy("pin", "default/web:nosuch", "userspace").wants(t, 1, "nosuch")
	w.kproxy("pin", "default/nosuch", "userspace").wants(t, 1, "default/nosuch")
	w.kproxy("pin", "default/web", "sideways").wants(t, 2, "sideways", "userspace, kernel, auto")
	w.kproxy("pin", "default/web").wants(t, 2)
	w.pin("web", "line", service.PreferKernel) // as the other subtests have it
}

func (w *world) metricsAddress(t *testing.T, inUserspace, inKernel *lab.Held) {
	const at = "http://127.0.0.1:10249"
	code, body := w.get(at + "/api/v1/status")
	var st plan.Status
	if err := json.Unmarshal([]byte(body), &st); err != nil || code != http.StatusOK || !st.Alive || len(st.Services) != 6 {
		t.Errorf("/api/v1/status: %d, %v, alive %v, %d services", code, err, st.Alive, len(st.Services))
	}
	code, body = w.get(at + "/api/v1/connections?service=default/web:line")
	if code != http.StatusOK || !strings.Contains(body, inUserspace.LocalAddr().String()) || !strings.Contains(body, inKernel.LocalAddr().String()) {
		t.Errorf("/api/v1/connections: %d, without the held connections:\n%s", code, body)
	}
	code, body = w.get(at + "/metrics")
	for _, want := range []string{
		`kproxy_alive 1`, `kproxy_services{dataplane="` + string(w.plane) + `"} `, `kproxy_source_errors{source="` + w.manifests + `"} 0`,
		`kproxy_service_connections_active{namespace="default",port="line",protocol="TCP",service="web"} 2`,
		"kubeproxy_sync_proxy_rules_duration_seconds_count", `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"}`, "go_goroutines",
	} {
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("/metrics: %d, without %s", code, want)
		}
	}
	for path, want := range map[string]string{"/proxyMode": string(mode), "/configz": w.manifests, "/healthz": "ok", "/": "kproxy"} {
		if code, body := w.get(at + path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d, without %q:\n%s", path, code, want, body)
		}
	}
}

func (w *world) healthzAddress(t *testing.T) {
	for _, address := range []string{"127.0.0.1:10256", "10.1.0.1:10256"} {
		for path, want := range map[string]string{"/healthz": `"healthy": true`, "/livez": `"healthy": true`, "/readyz": "ok"} {
			code, body := w.get("http://" + address + path)
			if flat := strings.ReplaceAll(body, `":true`, `": true`); code != http.StatusOK || !strings.Contains(flat, want) {
				t.Errorf("%s%s: %d %s, want 200 with %s", address, path, code, body, want)
			}
		}
	}
}

// TestCommandsThatNeedNoRoot: check, render and version work for anybody, on
// a host without iptables, and touch nothing.
func TestCommandsThatNeedNoRoot(t *testing.T) {
	dir := publicDir(t)
	l := lab.New(lab.DefaultConfig()) // for its addresses only: it isn't up
	m := newManifest("web", 10, l.Backends...)
	write(t, filepath.Join(dir, "web.yaml"), m.YAML())
	run := func(args ...string) ended {
		cmd := asNobody(t, command(t, args...))
		cmd.Env = []string{"PATH=/nonexistent"}
		return finish(t, nil, cmd)
	}
	run("version").wants(t, 0, "kproxy ", "commit ", "go1.")
	run("check", "--manifests", dir).wants(t, 0, "3 service ports", "no problem")
	run("check").wants(t, 2, "--manifests")
	run("check", "--manifests", filepath.Join(dir, "nosuch")).wants(t, 2, "nosuch")

	first := run("render", "--mode", "iptables", "--manifests", dir, "--node", "node")
	first.wants(t, 0, "KPROXY-SERVICES", "default/web:line", "10.96.0.10", "fd00:96::a", "10.2.0.2:9000", "KPROXY-USER-4")
	if second := run("render", "--mode", "iptables", "--manifests", dir, "--node", "node"); second.stdout != first.stdout {
		t.Errorf("two renderings of the same manifests differ:\n%s\n%s", first.stdout, second.stdout)
	}
	userspace := run("render", "--mode", "userspace", "--manifests", dir, "--node", "node")
	userspace.wants(t, 0, "KPROXY-PORTAL")
	if strings.Contains(userspace.stdout, "--to-destination 10.2.") {
		t.Errorf("mode userspace has rules to endpoints:\n%s", userspace.stdout)
	}
	run("render", "--mode", "sideways", "--manifests", dir).wants(t, 2, "sideways")

	write(t, filepath.Join(dir, "broken.yaml"), "apiVersion: v1\nkind: Service\nmetadata:\n  name: broken\n  namespace: default\nspec:\n  prots: []\n")
	run("check", "--manifests", dir).wants(t, 2, filepath.Join(dir, "broken.yaml")+":7: ", "prots")
}

// write writes a file by rename: half a file is another manifest.
func write(t *testing.T, path, text string) {
	t.Helper()
	part := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".part")
	err := os.WriteFile(part, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		t.Fatal(err)
	}
}
