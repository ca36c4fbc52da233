package file

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/strict"
)

const fuzzSlice = `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"web-1","labels":{"kubernetes.io/service-name":"web"},
"annotations":{"kproxy.dev/weights":"10.2.0.2=3"}},"addressType":"IPv4","ports":[{"port":8080}],"endpoints":[{"addresses":["10.2.0.2"],"conditions":{"ready":true}}]}`

// Whatever a file holds, it gives objects or problems, on lines that exist, and
// objects convert.
func FuzzParse(f *testing.F) {
	f.Add(goodService, false)
	f.Add(goodService+"---\n"+fuzzSlice, false)
	f.Add(fuzzSlice, true)
	f.Add("apiVersion: v1\nkind: List\nitems:\n- &a {apiVersion: v1, kind: Node, metadata: {name: a}}\n- <<: *a\n", false)
	f.Add("a: &x [*x, *y, !!int 1_0, .5, ~, 2024-01-01, \"\\u00e9\", |\n x]\n", false)
	f.Add(`{"apiVersion":"v1","kind":"ServiceList","items":[{"spec":{"ports":[{"port":1e3,"targetPort":"a"}]}}]}`, true)
	f.Fuzz(func(t *testing.T, text string, asJSON bool) {
		name := "a.yaml"
		if asJSON {
			name = "a.json"
		}
		m, problems := parse(name, []byte(text))
		most := 2 // an empty value may end past the last line
		for _, r := range text {
			if strings.ContainsRune("\n\r\u0085\u2028\u2029", r) {
				most++
			}
		}
		for _, p := range append(append(problems, m.advice...), m.skipped...) {
			if p.Line < 1 || p.Line > most || p.Message == "" {
				t.Errorf("%q is on line %d of %d: %q", p.Message, p.Line, most, text)
			}
		}
		if len(problems) > 0 {
			return
		}
		s := newStore(nil, nil)
		s.order = []string{name}
		s.files[name] = &manifestFile{manifest: m}
		snapshot, _ := s.build("node-1")
		for _, o := range m.objects {
			svc, ok := o.Object.(*corev1.Service)
			if !ok || !source.Serves(svc) {
				continue
			}
			served := 0
			for p := range snapshot.All() {
				if p.Namespace == svc.Namespace && p.Name == svc.Name {
					served++
				}
			}
			if served == 0 {
				t.Errorf("valid Service %s/%s is not served: %q", svc.Namespace, svc.Name, text)
			}
		}
	})
}

// Whatever Kubernetes' strict decoder refuses has a place.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		fuzzSlice,
		`{"metadata":{"name":"a","name":"b"}}`,
		`{"spec":{"ports":[{"port":80.0}]}}`,
		`{"spec":{"ports":[{"port":4294967296}]}}`,
		`{"spec":{"ports":{"port":80}}}`,
		`{"spec":{"ports":[{"targetPort":{}}]}}`,
		`{"metadata":{"creationTimestamp":"2024-05-01T10:00:00Z","labels":{"a":1}}}`,
		`{"spec":{"clusterIP":null,"publishNotReadyAddresses":"yes"}}`,
		`{"Spec":{}}`,
		`{"status":{"capacity":{"cpu":2,"memory":"8Gi"}}}`,
		`{"metadata":{"managedFields":[{"fieldsV1":{"f:spec":{}}}]}}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		docs, err := strict.Documents("a.json", []byte(text))
		if err != nil || len(docs) != 1 || docs[0].Kind() != strict.Mapping {
			return
		}
		for _, create := range kinds {
			into := create()
			wrong, _ := docs[0].Decode(into)
			for _, w := range wrong {
				if w.Path == "" {
					t.Errorf("%T from %s: only the decoder knows of %v", into, text, w)
				}
			}
		}
	})
}
