package web

import (
	"encoding/json"
	"strings"
	"testing"

	"kproxy.dev/kproxy/plan"
)

// Elements come one by one, wherever their list stands, and the rest is read as ever; what is no such answer is an error.
func TestEachOf(t *testing.T) {
	for text, want := range map[string]string{
		`{"version":"v1","services":[{"name":"a"},{"name":"b"}],"mode":"auto"}`: "v1 auto a b",
		`{"services":[{"name":"a"}],"version":"v1","mode":"ipvs","new":[1,{}]}`: "v1 ipvs a",
		`{"services":null,"version":"v1","mode":"auto"}`:                        "v1 auto",
		`{"services":[],"version":"v1","mode":"auto"}`:                          "v1 auto",
		`[]`:                     "error",
		`{"services":{}}`:        "error",
		`{"services":[{"name":`:  "error",
		`{"services":[],"versi`:  "error",
		`{"version":1}`:          "error",
		`{"services":[{}],"a":1`: "error",
	} {
		var st plan.Status
		var names []string
		err := eachOf(json.NewDecoder(strings.NewReader(text)), "services", &st, func(s *plan.ServiceStatus) { names = append(names, s.Name) })
		got := strings.Join(append([]string{st.Version, string(st.Mode)}, names...), " ")
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %q (%v), want %q", text, got, err, want)
		}
	}
}
