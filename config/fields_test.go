package config

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/kube-proxy/config/v1alpha1"
)

var kubeProxyType = reflect.TypeFor[v1alpha1.KubeProxyConfiguration]()

// leaves returns the path of every field of t that holds no further ones.
func leaves(t reflect.Type, prefix string) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	decodesItself := reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
	if t.Kind() != reflect.Struct || decodesItself {
		return []string{prefix}
	}
	var out []string
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-":
		case f.Anonymous && name == "":
			out = append(out, leaves(f.Type, prefix)...)
		default:
			out = append(out, leaves(f.Type, strings.TrimPrefix(prefix+"."+name, "."))...)
		}
	}
	return out
}

// A field that a new version of the API has can't be forgotten.
func TestFieldsAreThoseOfTheAPI(t *testing.T) {
	want := slices.DeleteFunc(leaves(kubeProxyType, ""), func(path string) bool {
		return path == "apiVersion" || path == "kind"
	})
	var got []string
	for _, f := range Fields() {
		got = append(got, f.Path)
	}
	for _, path := range want {
		if !slices.Contains(got, path) {
			t.Errorf("%s is a field of KubeProxyConfiguration that isn't in the table of fields: honour it, or say why it is ignored", path)
		}
	}
	for i, path := range got {
		if !slices.Contains(want, path) {
			t.Errorf("%s is in the table, but no field of KubeProxyConfiguration", path)
		}
		if slices.Contains(got[:i], path) {
			t.Errorf("%s is in the table twice", path)
		}
	}
	if len(got) < 60 {
		t.Errorf("only %d fields", len(got))
	}
}

func TestFieldsAreHonouredOrIgnored(t *testing.T) {
	parts := AsKubeProxy().texts()
	for _, f := range Fields() {
		if honoured := f.Sets != "" && f.Flag() != ""; honoured == (f.Ignored != "") {
			t.Errorf("%s: has to set something and have a flag, or be ignored: %+v", f.Path, f)
		}
		if _, ok := parts[f.Sets]; f.Sets != "" && !ok {
			t.Errorf("%s sets %s, which Config doesn't have", f.Path, f.Sets)
		}
	}
}

// examples has for every honoured field a value that isn't its default, and
// what comes of it.
var examples = map[string]struct{ value, want string }{
	"clientConnection.kubeconfig":     {"/etc/kubeconfig", "/etc/kubeconfig"},
	"clientConnection.contentType":    {"application/json", "application/json"},
	"clientConnection.qps":            {"0.1", "0.1"},
	"clientConnection.burst":          {"20", "20"},
	"logging.format":                  {"json", "json"},
	"logging.verbosity":               {"6", "6"},
	"hostnameOverride":                {"' Node-1 '", "node-1"},
	"bindAddress":                     {"192.0.2.1", "192.0.2.1"},
	"healthzBindAddress":              {"192.0.2.1", "192.0.2.1:10256"},
	"metricsBindAddress":              {"'[::]:9999'", "[::]:9999"},
	"enableProfiling":                 {"true", "true"},
	"mode":                            {"ipvs", "ipvs"},
	"iptables.masqueradeBit":          {"0", "0"},
	"iptables.masqueradeAll":          {"true", "true"},
	"iptables.localhostNodePorts":     {"false", "false"},
	"ipvs.scheduler":                  {"wlc", "wlc"},
	"ipvs.strictARP":                  {"true", "true"},
	"ipvs.tcpTimeout":                 {"20m", "20m0s"},
	"ipvs.tcpFinTimeout":              {"2m", "2m0s"},
	"ipvs.udpTimeout":                 {"3m", "3m0s"},
	"nftables.masqueradeBit":          {"0", "0"},
	"nftables.masqueradeAll":          {"true", "true"},
	"detectLocalMode":                 {"NodeCIDR", "NodeCIDR"},
	"detectLocal.bridgeInterface":     {"cni0", "cni0"},
	"detectLocal.interfaceNamePrefix": {"veth", "veth"},
	"clusterCIDR":                     {"'10.1.0.0/16, fd00::/48'", "10.1.0.0/16,fd00::/48"},
	"nodePortAddresses":               {"[localhost, 192.0.2.0/24]", "localhost,192.0.2.0/24"},
	"oomScoreAdj":                     {"0", "0"},
	"conntrack.maxPerCore":            {"0", "0"},
	"conntrack.min":                   {"0", "0"},
	"conntrack.tcpEstablishedTimeout": {"0s", "0s"},
	"conntrack.tcpCloseWaitTimeout":   {"1m", "1m0s"},
	"conntrack.tcpBeLiberal":          {"true", "true"},
	"conntrack.udpTimeout":            {"10s", "10s"},
	"conntrack.udpStreamTimeout":      {"20s", "20s"},
}

// besides are the parts whose defaults depend on a field.
var besides = map[string][]string{"mode": {"ipvs.tcpTimeout", "localhostNodePorts"}}

// Every field that is called honoured changes what it is said to set, and
// nothing else.
func TestHonouredFieldsTakeEffect(t *testing.T) {
	for _, f := range Fields() {
		if f.Ignored != "" {
			continue
		}
		example, ok := examples[f.Path]
		if !ok {
			t.Errorf("%s has no example", f.Path)
			continue
		}
		mode := ""
		if f.Only == "nftables" {
			mode = "mode: nftables\n"
		}
		head := "apiVersion: " + apiVersion + "\nkind: " + kind + "\n" + mode
		without, with := apply(t, head), apply(t, head+nest(f.Path, example.value))
		for _, c := range without.Changes(with) {
			if c.Part != f.Sets && !slices.Contains(besides[f.Path], c.Part) {
				t.Errorf("%s: %s changes %s, but is said to set %s", f.Path, example.value, c, f.Sets)
			}
		}
		if got := with.texts()[f.Sets]; got != example.want || got == without.texts()[f.Sets] {
			t.Errorf("%s: %s makes %s %q, want %q, which is not its default", f.Path, example.value, f.Sets, got, example.want)
		}
	}
	for path := range examples {
		if !slices.ContainsFunc(fields, func(f Field) bool { return f.Path == path && f.Ignored == "" }) {
			t.Errorf("%s has an example, but is not honoured", path)
		}
	}
}

// nest writes "a.b: value" as YAML.
func nest(path, value string) string {
	var b strings.Builder
	steps := strings.Split(path, ".")
	for i, step := range steps {
		b.WriteString(strings.Repeat("  ", i) + step + ":")
		if i < len(steps)-1 {
			b.WriteString("\n")
		}
	}
	return b.String() + " " + value + "\n"
}

// apply reads text over kproxy's defaults.
func apply(t *testing.T, text string) Config {
	t.Helper()
	f, err := Parse("config.conf", []byte(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	c := AsKubeProxy()
	f.Apply(&c)
	return c
}
