package kube

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const kubeconfig = `apiVersion: v1
kind: Config
current-context: here
clusters:
- {name: cluster, cluster: {server: "https://10.0.0.1:6443", insecure-skip-tls-verify: true}}
users:
- {name: user, user: {token: secret}}
contexts:
- {name: here, context: {cluster: cluster, user: user}}
`

func TestOpen(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "") // not in a pod, wherever this runs
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	without := func(line string) string { return strings.Replace(kubeconfig, line, "", 1) }
	good := write("good", kubeconfig)
	tests := []struct {
		name string
		cfg  Config
		host string // of the API server
		want string // of the error; DIR stands for the directory
	}{
		{"a file", Config{Kubeconfig: good}, "https://10.0.0.1:6443", ""},
		{"a file, and another server", Config{Kubeconfig: good, Master: "https://10.0.0.2:6443"}, "https://10.0.0.2:6443", ""},
		{"a server alone", Config{Master: "http://127.0.0.1:8080"}, "http://127.0.0.1:8080", ""},
		{"no file", Config{Kubeconfig: dir + "/none"}, "", "--kubeconfig: there is no file DIR/none"},
		{"a directory", Config{Kubeconfig: dir}, "", "--kubeconfig: read DIR: "},
		{"empty", Config{Kubeconfig: write("empty", "")}, "", "--kubeconfig: DIR/empty names no cluster; a kubeconfig has"},
		{"no YAML", Config{Kubeconfig: write("bad", "a: b: c\n")}, "", "--kubeconfig: read DIR/bad: yaml: "},
		{"no kubeconfig", Config{Kubeconfig: write("service", "apiVersion: v1\nkind: Service\n")}, "", "--kubeconfig: read DIR/service: "},
		{"no context", Config{Kubeconfig: write("context", without("current-context: here\n"))}, "", "--kubeconfig: DIR/context has no current-context, which"},
		{"unknown cluster", Config{Kubeconfig: write("cluster", strings.Replace(kubeconfig, "cluster: cluster,", "cluster: nowhere,", 1))}, "",
			`--kubeconfig: DIR/cluster has no cluster "nowhere", which its context "here" names`},
		{"unknown user", Config{Kubeconfig: write("user", strings.Replace(kubeconfig, "user: user}", "user: nobody}", 1))}, "",
			`--kubeconfig: DIR/user has no user "nobody", which its context "here" names`},
		{"unknown context", Config{Kubeconfig: write("there", strings.Replace(kubeconfig, "context: here", "context: there", 1))}, "",
			`--kubeconfig: DIR/there has no context "there", which its current-context names`},
		{"no certificate", Config{Kubeconfig: write("ca", strings.Replace(kubeconfig, "insecure-skip-tls-verify: true", "certificate-authority: nowhere.pem", 1))}, "",
			"--kubeconfig: DIR/ca: invalid configuration: unable to read certificate-authority DIR/nowhere.pem"},
		{"bad certificate", Config{Kubeconfig: write("pem", strings.Replace(kubeconfig, "insecure-skip-tls-verify: true", "certificate-authority-data: eA==", 1))}, "",
			"use what --kubeconfig DIR/pem says: "},
		{"not in a pod", Config{}, "", "use the service account of this pod: "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, err := Open(tt.cfg)
			var usage *ConfigError
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.want == "" && s.Status()[0].Name != tt.host:
				t.Errorf("server %s, want %s", s.Status()[0].Name, tt.host)
			case tt.want == "":
			case !errors.As(err, &usage):
				t.Errorf("error %v, want a ConfigError", err)
			case !strings.HasPrefix(strings.ReplaceAll(err.Error(), dir, "DIR"), tt.want) || strings.Contains(err.Error(), "\n"):
				t.Errorf("error %q, want one line that begins with %q", err, tt.want)
			}
		})
	}
}
