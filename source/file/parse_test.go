package file

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func lines(problems []Problem) (out []string) {
	for _, p := range problems {
		out = append(out, p.String())
	}
	return out
}

func names(m manifest) (out []string) {
	for _, o := range m.objects {
		out = append(out, o.id().String())
	}
	return out
}

const goodService = `apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.10
  ports:
  - port: 80
`

func TestParseProblems(t *testing.T) {
	cases := map[string]struct {
		file string // a.yaml unless given
		text string
		want []string
	}{
		"unknown field": {text: goodService + "    prot: TCP\n",
			want: []string{"a.yaml:9: Service default/web: spec.ports[0].prot: unknown field, did you mean port?"}},
		"unknown field in another case": {text: strings.Replace(goodService, "clusterIP", "clusterip", 1),
			want: []string{"a.yaml:6: Service default/web: spec.clusterip: unknown field, did you mean clusterIP?"}},
		"field given twice": {text: goodService + "  clusterIP: 10.96.0.11\n",
			want: []string{"a.yaml:9: Service default/web: spec.clusterIP: given twice, first on line 6"}},
		"label given twice": {text: strings.Replace(goodService, "  name: web", "  name: web\n  labels:\n    a: b\n    c: d\n    a: e", 1),
			want: []string{"a.yaml:8: Service default/web: metadata.labels[a]: given twice, first on line 6"}},
		"string for a number": {text: strings.Replace(goodService, "port: 80", "port: http", 1),
			want: []string{`a.yaml:8: Service default/web: spec.ports[0].port: expected a whole number of 32 bits, found the string "http"`}},
		"quoted number": {text: strings.Replace(goodService, "port: 80", `port: "80"`, 1),
			want: []string{`a.yaml:8: Service default/web: spec.ports[0].port: expected a whole number of 32 bits, found the string "80"`}},
		"fraction": {text: strings.Replace(goodService, "port: 80", "port: 80.0", 1),
			want: []string{"a.yaml:8: Service default/web: spec.ports[0].port: expected a whole number of 32 bits, found the number 80.0"}},
		"beyond 32 bits": {text: strings.Replace(goodService, "port: 80", "port: 4294967376", 1),
			want: []string{"a.yaml:8: Service default/web: spec.ports[0].port: expected a whole number of 32 bits, found the number 4294967376"}},
		"number for a string": {text: strings.Replace(goodService, "name: web", "name: web\n  annotations:\n    kproxy.dev/retries: 3", 1),
			want: []string{"a.yaml:6: Service default/web: metadata.annotations[kproxy.dev/retries]: expected a string, found the number 3: put it in quotes"}},
		"boolean for a string": {text: strings.Replace(goodService, "name: web", "name: true", 1),
			want: []string{"a.yaml:4: Service: metadata.name: expected a string, found the boolean true: put it in quotes"}},
		"string for a boolean": {text: goodService + "  publishNotReadyAddresses: yes\n",
			want: []string{`a.yaml:9: Service default/web: spec.publishNotReadyAddresses: expected true or false, found the string "yes"`}},
		"object for a list": {text: strings.Replace(goodService, "- port", "  port", 1),
			want: []string{"a.yaml:8: Service default/web: spec.ports: expected a list, found an object"}},
		"list for an object": {text: strings.Replace(goodService, "  name: web", "- name: web", 1),
			want: []string{"a.yaml:4: Service: metadata: expected an object, found a list"}},
		"list for a string": {text: strings.Replace(goodService, "10.96.0.10", "[10.96.0.10]", 1),
			want: []string{"a.yaml:6: Service default/web: spec.clusterIP: expected a string, found a list"}},
		"string for a map": {text: strings.Replace(goodService, "name: web", "name: web\n  labels: none", 1),
			want: []string{`a.yaml:5: Service default/web: metadata.labels: expected an object, found the string "none"`}},
		"bad time": {text: strings.Replace(goodService, "name: web", "name: web\n  creationTimestamp: yesterday", 1),
			want: []string{`a.yaml:5: Service default/web: metadata.creationTimestamp: the string "yesterday" doesn't fit: parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday" as "2006"`}},
		"bad target port": {text: goodService + "    targetPort: [1]\n",
			want: []string{`a.yaml:9: Service default/web: spec.ports[0].targetPort: a list doesn't fit: json: cannot unmarshal array into Go value of type int32`}},
		"every problem at once, by line": {text: strings.Replace(goodService, "name: web", "name: web\n  name: web\n  lables: {}", 1) + "    protocol: 6\n",
			want: []string{
				"a.yaml:5: Service default/web: metadata.name: given twice, first on line 4",
				"a.yaml:6: Service default/web: metadata.lables: unknown field, did you mean labels?",
				"a.yaml:11: Service default/web: spec.ports[0].protocol: expected a string, found the number 6: put it in quotes",
			}},
		"contradictions": {text: `apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: shop
spec:
  clusterIP: 10.96.0.10
  clusterIPs:
  - 10.96.0.10
  - 10.96.0.11
  ports:
  - port: 70000
    nodePort: 30080
`, want: []string{
			"a.yaml:10: Service shop/web: spec.clusterIPs[1]: 10.96.0.11 is the second address of family ipv4",
			"a.yaml:12: Service shop/web: spec.ports[0].port: 70000 is not a port number from 1 to 65535",
			"a.yaml:13: Service shop/web: spec.ports[0].nodePort: a Service of type ClusterIP has no node ports",
		}},
		"missing field": {text: "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIP: 10.96.0.10\n",
			want: []string{"a.yaml:5: Service default/web: spec.ports: missing: a Service needs a port"}},
		"bad label value": {text: "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: web-1\n  labels:\n    kubernetes.io/service-name: Web\naddressType: IPv4\n",
			want: []string{`a.yaml:6: EndpointSlice default/web-1: metadata.labels[kubernetes.io/service-name]: "Web" is not a name: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit`}},
		"bad endpoint address": {text: "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: web-1\naddressType: IPv4\nendpoints:\n- addresses:\n  - 10.2.0.2\n- addresses:\n  - 10.2.0.300\n",
			want: []string{
				"a.yaml:3: EndpointSlice default/web-1: metadata.labels[kubernetes.io/service-name]: missing: the slice belongs to no Service",
				`a.yaml:10: EndpointSlice default/web-1: endpoints[1].addresses[0]: "10.2.0.300" is not an IP address`,
			}},
		"every problem of one object": {text: strings.NewReplacer("name: web", "name: web\n  annotations:\n    kproxy.dev/retires: \"3\"\n    kproxy.dev/algorithm: maglv", "port: 80", "port: 800000\n    protocol: ICMP\n    nodePort: x\n  selektor: {}").Replace(goodService),
			want: []string{
				`a.yaml:6: Service default/web: kproxy.dev/retires: kproxy has no such annotation, did you mean kproxy.dev/retries?`,
				`a.yaml:7: Service default/web: kproxy.dev/algorithm: "maglv" is not one of round-robin, weighted-round-robin, least-connections, random, source-hash, maglev`,
				`a.yaml:11: Service default/web: spec.ports[0].port: 800000 is not a port number from 1 to 65535`,
				`a.yaml:12: Service default/web: spec.ports[0].protocol: "ICMP" is not one of TCP, UDP, SCTP`,
				`a.yaml:13: Service default/web: spec.ports[0].nodePort: expected a whole number of 32 bits, found the string "x"`,
				"a.yaml:14: Service default/web: spec.selektor: unknown field, did you mean selector?",
			}},
		"what is missing because it is misspelt": {text: strings.NewReplacer("ports:", "prots:", "clusterIP", "clusterIPP").Replace(goodService),
			want: []string{
				"a.yaml:6: Service default/web: spec.clusterIPP: unknown field, did you mean clusterIP?",
				"a.yaml:7: Service default/web: spec.prots: unknown field, did you mean ports?",
			}},
		"the second document": {text: goodService + "---\n" + strings.Replace(goodService, "port: 80", "port: 0", 1),
			want: []string{"a.yaml:17: Service default/web: spec.ports[0].port: 0 is not a port number from 1 to 65535"}},
		"no kind": {text: "apiVersion: v1\nmetadata: {}\n",
			want: []string{"a.yaml:1: kind: missing"}},
		"no kind and no version": {text: "# empty\n\nname: x\n",
			want: []string{"a.yaml:3: apiVersion: missing", "a.yaml:3: kind: missing"}},
		"kind of another type": {text: "apiVersion: 1\nkind: [Service]\n",
			want: []string{"a.yaml:1: apiVersion: expected a string, found the number 1", "a.yaml:2: kind: expected a string, found a list"}},
		"kind in another case": {text: strings.Replace(goodService, "kind: Service", "kind: service", 1),
			want: []string{"a.yaml:2: kind service doesn't exist, did you mean Service?"}},
		"kind with a letter less": {text: strings.Replace(goodService, "kind: Service", "kind: Servce", 1),
			want: []string{"a.yaml:2: kind Servce doesn't exist, did you mean Service?"}},
		"kind of list with a letter less": {text: "apiVersion: v1\nkind: NodList\n---\napiVersion: v1\nkind: Lisst\n",
			want: []string{"a.yaml:2: kind NodList doesn't exist, did you mean NodeList?", "a.yaml:5: kind Lisst doesn't exist, did you mean List?"}},
		"misspelt API group": {text: "apiVersion: discovry.k8s.io/v1\nkind: EndpointSlice\n",
			want: []string{"a.yaml:2: discovry.k8s.io/v1 has no kind EndpointSlice, did you mean apiVersion discovery.k8s.io/v1, kind EndpointSlice?"}},
		"kind of another version": {text: "apiVersion: v1\nkind: EndpointSlice\n",
			want: []string{"a.yaml:2: v1 has no kind EndpointSlice, did you mean apiVersion discovery.k8s.io/v1, kind EndpointSlice?"}},
		"no object": {text: "hello\n---\n- 1\n",
			want: []string{`a.yaml:1: expected a Kubernetes object, found the string "hello"`, "a.yaml:3: expected a Kubernetes object, found a list"}},
		"an item of a list": {text: "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: {clusterIP: None, port: 80}\n- 5\n",
			want: []string{"a.yaml:7: Service default/a: spec.port: unknown field, did you mean ports?", "a.yaml:8: expected a Kubernetes object, found the number 5"}},
		"a list that is none": {text: "apiVersion: v1\nkind: List\nitem: []\nitems: {}\n",
			want: []string{"a.yaml:3: List: item: unknown field, did you mean items?", "a.yaml:4: List: items: expected a list, found an object"}},
		"an alias": {text: "apiVersion: v1\nkind: Service\nmetadata: &m\n  name: web\n  lables: {}\nspec: *nope\n",
			want: []string{"a.yaml:6: alias *nope stands for nothing"}},
		"an aliased problem is where it is written": {text: "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  labels: &l\n    a: 1\n  annotations: *l\nspec: {clusterIP: None}\n",
			want: []string{
				"a.yaml:6: Service default/web: metadata.labels[a]: expected a string, found the number 1: put it in quotes",
				"a.yaml:6: Service default/web: metadata.annotations[a]: expected a string, found the number 1: put it in quotes",
			}},
		"an alias inside of itself": {text: "apiVersion: v1\nkind: &k [*k]\n",
			want: []string{"a.yaml:2: alias *k stands inside of what it stands for"}},
		"a key that is a list": {text: "[1, 2]: x\n", want: []string{"a.yaml:1: a key has to be a string"}},
		"a key that is null":   {text: "a: 1\n~: x\n", want: []string{"a.yaml:2: a key has to be a string"}},
		"a tag":                {text: "a: 1\nb: !secret x\n", want: []string{"a.yaml:2: tag !secret has no meaning here"}},
		"binary":               {text: "a: !!binary aGVsbG8=\n", want: []string{"a.yaml:1: tag !!binary has no meaning here"}},
		"infinity":             {text: "a: .inf\n", want: []string{`a.yaml:1: ".inf" is not a boolean or a number that JSON could hold`}},
		"a tag that lies":      {text: "a: !!int x\n", want: []string{`a.yaml:1: "x" is not a boolean or a number that JSON could hold`}},
		"merging a scalar":     {text: "a: 1\n<<: 5\n", want: []string{"a.yaml:2: << merges objects, found the number 5"}},
		"merging scalars":      {text: "a: 1\n<<: [5]\n", want: []string{"a.yaml:2: << merges objects, found the number 5"}},
		"nested too deep":      {text: strings.Repeat("[", 300) + strings.Repeat("]", 300), want: []string{"a.yaml:1: nested more than 200 levels deep"}},
		"tab":                  {text: "a: 1\nb:\n\tc: 2\n", want: []string{"a.yaml:3: found character that cannot start any token"}},
		"two colons":           {text: "a: 1\nb: c: d\n", want: []string{"a.yaml:2: mapping values are not allowed in this context"}},
		"indentation":          {text: "a:\n  - x\n b: 1\n", want: []string{"a.yaml:3: did not find expected key"}},
		"no colon":             {text: "a: 1\nb\nc: 2\n", want: []string{"a.yaml:2: could not find expected ':'"}},
		"a brace too many":     {text: "a: 1\n\n\n}\n", want: []string{"a.yaml:4: did not find expected key"}},
		"a problem and then a syntax error": {text: strings.Replace(goodService, "port: 80", "port: 0", 1) + "---\na: b: c\n",
			want: []string{"a.yaml:8: Service default/web: spec.ports[0].port: 0 is not a port number from 1 to 65535", "a.yaml:10: mapping values are not allowed in this context"}},
		"control character": {text: "a: 1\nb: \x01\n", want: []string{"a.yaml:2: the file is not text in UTF-8"}},
		"Latin-1":           {text: "a: 1\n\nb: \xe4\n", want: []string{"a.yaml:3: the file is not text in UTF-8"}},

		"JSON, unknown field": {file: "a.json", text: "{\n \"apiVersion\": \"v1\",\n \"kind\": \"Service\",\n \"metadata\": {\"name\": \"web\"},\n \"spec\": {\n  \"clusterIP\": \"None\",\n  \"port\": 80\n }\n}\n",
			want: []string{"a.json:7: Service default/web: spec.port: unknown field, did you mean ports?"}},
		"JSON, key given twice": {file: "a.json", text: "{\"apiVersion\": \"v1\",\n\"kind\": \"Node\",\n\"metadata\": {\"name\": \"a\",\n\"name\": \"b\"}}\n",
			want: []string{"a.json:4: Node a: metadata.name: given twice, first on line 3"}},
		"JSON, wrong type in the second value": {file: "a.json", text: "{\"apiVersion\": \"v1\", \"kind\": \"Node\", \"metadata\": {\"name\": \"a\"}}\n{\"apiVersion\": \"v1\", \"kind\": \"Node\", \"metadata\": {\"name\":\n 5}}\n",
			want: []string{"a.json:3: Node: metadata.name: expected a string, found the number 5: put it in quotes"}},
		"JSON, missing comma":   {file: "a.json", text: "{\n\"a\": 1\n\"b\": 2\n}", want: []string{`a.json:3: invalid character '"' after object key:value pair`}},
		"JSON, trailing comma":  {file: "a.json", text: "{\n\"a\": 1,\n}", want: []string{`a.json:3: invalid character '}' looking for beginning of object key string`}},
		"JSON, no colon":        {file: "a.json", text: "{\n\"a\" 1\n}", want: []string{`a.json:2: invalid character '1' after object key`}},
		"JSON, unfinished":      {file: "a.json", text: "{\n\"a\": [1,\n2\n\n", want: []string{"a.json:3: the file ends in the middle of a value"}},
		"JSON, unfinished key":  {file: "a.json", text: "{\n\"a", want: []string{"a.json:2: the file ends in the middle of a value"}},
		"JSON, a stray brace":   {file: "a.json", text: "{}\n}", want: []string{"a.json:1: apiVersion: missing", "a.json:1: kind: missing", "a.json:2: invalid character '}' looking for beginning of value"}},
		"JSON, YAML instead":    {file: "a.json", text: "\napiVersion: v1\n", want: []string{"a.json:2: invalid character 'a' looking for beginning of value"}},
		"JSON, nested too deep": {file: "a.json", text: strings.Repeat("[", 300), want: []string{"a.json:1: nested more than 200 levels deep"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if c.file == "" {
				c.file = "a.yaml"
			}
			_, problems := parse(c.file, []byte(c.text))
			if diff := cmp.Diff(c.want, lines(problems)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseAccepts(t *testing.T) {
	const node = `{"apiVersion":"v1","kind":"Node","metadata":{"name":"a"}}`
	cases := map[string]struct {
		file, text string
		want       []string
	}{
		"nothing":                {"a.yaml", "", nil},
		"comments":               {"a.yaml", "# nothing\n", nil},
		"empty documents":        {"a.yaml", "---\n---\n# x\n---\n" + goodService + "---\n", []string{"Service default/web"}},
		"many documents":         {"a.yaml", goodService + "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1}\n...\n---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: web, namespace: shop}\n", []string{"Service default/web", "Node n1", "Endpoints shop/web"}},
		"a byte order mark":      {"a.yaml", "\uFEFF" + goodService, []string{"Service default/web"}},
		"Windows line ends":      {"a.yaml", strings.ReplaceAll(goodService, "\n", "\r\n"), []string{"Service default/web"}},
		"JSON in YAML":           {"a.yml", node, []string{"Node a"}},
		"JSON":                   {"a.json", node, []string{"Node a"}},
		"JSON with tabs":         {"a.json", "\t{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"Node\", \"metadata\": {\"name\": \"a\"}}", []string{"Node a"}},
		"JSON values in a row":   {"a.json", node + strings.Replace(node, `"a"`, `"b"`, 1) + "\nnull\n", []string{"Node a", "Node b"}},
		"JSON escapes":           {"a.json", strings.Replace(node, `"name":"a"`, `"name":"a","labels":{"x":"\ud83d\ude00\/\u0000"}`, 1), []string{"Node a"}},
		"a List":                 {"a.yaml", "apiVersion: v1\nkind: List\nmetadata: {resourceVersion: \"\"}\nitems:\n- " + node + "\n- {apiVersion: v1, kind: List, items: [" + node + "]}\n", []string{"Node a", "Node a"}},
		"an empty List":          {"a.yaml", "apiVersion: v1\nkind: List\n", nil},
		"a typed list":           {"a.json", `{"apiVersion":"v1","kind":"NodeList","metadata":{},"items":[{"metadata":{"name":"a"}},{"metadata":{"name":"b"}}]}`, []string{"Node a", "Node b"}},
		"null fields":            {"a.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web, creationTimestamp: null, labels: ~}\nspec: {clusterIP: None, ports: null}\nstatus: {loadBalancer: {}}\n", []string{"Service default/web"}},
		"times without quotes":   {"a.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: a, creationTimestamp: 2024-05-01T10:00:00Z}\n", []string{"Node a"}},
		"quantities":             {"a.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nstatus: {capacity: {cpu: 2, memory: 8Gi, pods: 1.5}}\n", []string{"Node a"}},
		"numbers in other bases": {"a.yaml", strings.Replace(goodService, "port: 80", "port: 0x50", 1), []string{"Service default/web"}},
		"numbers as keys":        {"a.yaml", strings.Replace(goodService, "name: web", "name: web\n  labels: {1: a, true: b}", 1), []string{"Service default/web"}},
		"aliases and merges": {"a.yaml", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: &s\n    clusterIP: 10.96.0.1\n    ports: [{port: 80}]\n" +
			"- apiVersion: v1\n  kind: Service\n  metadata: {name: b}\n  spec:\n    <<: *s\n    clusterIP: 10.96.0.2\n" +
			"- apiVersion: v1\n  kind: Service\n  metadata: {name: c}\n  spec:\n    <<: [{clusterIP: 10.96.0.3}, *s]\n", []string{"Service default/a", "Service default/b", "Service default/c"}},
		"managed fields": {"a.yaml", strings.Replace(goodService, "name: web", "name: web\n  managedFields:\n  - manager: kubectl\n    operation: Update\n    apiVersion: v1\n    time: \"2024-05-01T10:00:00Z\"\n    fieldsType: FieldsV1\n    fieldsV1: {f:spec: {f:ports: {}}}\n", 1), []string{"Service default/web"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			m, problems := parse(c.file, []byte(c.text))
			if diff := cmp.Diff([]string(nil), lines(problems)); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.want, names(m)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseSkipsAndAdvises(t *testing.T) {
	m, problems := parse("a.yaml", []byte(`apiVersion: apps/v1
kind: Deployment
spec: {anything: [1, 2], twice: 1, twice: 2}
---
apiVersion: serving.knative.dev/v1
kind: Service
---
apiVersion: discovery.k8s.io/v1beta1
kind: EndpointSlice
---
apiVersion: v1
kind: Pod
---
apiVersion: v1
kind: PodList
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  ports: [{port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
addressType: IPv4
---
apiVersion: v1
kind: Service
metadata:
  name: web2
  labels: {service.kubernetes.io/service-proxy-name: x}
spec:
  ports: [{port: 80}]
`))
	if len(problems) > 0 {
		t.Errorf("problems %v", lines(problems))
	}
	skipped := []string{
		"a.yaml:1: skipped apps/v1 Deployment: not a kind that kproxy reads",
		"a.yaml:5: skipped serving.knative.dev/v1 Service: not a kind that kproxy reads",
		"a.yaml:8: skipped discovery.k8s.io/v1beta1 EndpointSlice: not a kind that kproxy reads",
		"a.yaml:11: skipped v1 Pod: not a kind that kproxy reads",
		"a.yaml:14: skipped v1 PodList: not a kind that kproxy reads",
		"a.yaml:17: skipped rbac.authorization.k8s.io/v1 Role: not a kind that kproxy reads",
	}
	if diff := cmp.Diff(skipped, lines(m.skipped)); diff != "" {
		t.Errorf("skipped (-want +got):\n%s", diff)
	}
	advice := []string{
		"a.yaml:23: Service default/web: spec.clusterIP: missing, and nothing allocates one for a manifest: the Service isn't served",
		"a.yaml:28: EndpointSlice default/web-1: metadata.labels[kubernetes.io/service-name]: missing: the slice belongs to no Service",
	}
	if diff := cmp.Diff(advice, lines(m.advice)); diff != "" {
		t.Errorf("advice (-want +got):\n%s", diff)
	}
}
