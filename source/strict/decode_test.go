package strict

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type sample struct {
	Name   string           `json:"name"`
	Long   int64            `json:"long"`
	Small  *int32           `json:"small"`
	Bits   uint32           `json:"bits"`
	Rate   float32          `json:"rate"`
	On     bool             `json:"on"`
	Wait   metav1.Duration  `json:"wait"`
	Later  *metav1.Duration `json:"later"`
	List   []sample         `json:"list"`
	Labels map[string]bool  `json:"labels"`
	Raw    []byte           `json:"raw"`
	Ports  map[int]string   `json:"ports"`
	Any    any              `json:"any"`
}

func TestDecode(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"everything fits", "name: a\nlong: -9223372036854775808\nsmall: null\nbits: 4294967295\nrate: 2\non: true\nwait: 1m30s\nlater: null\nlist: [{rate: 0.5}]\nlabels: {a: true}\nraw: YQ==\nports: {1: a}\nany: {a: [1]}\n", nil},
		{"bytes", "raw: 1\n", []string{"line 1: raw: expected a list, found the number 1"}},
		{"what only the decoder knows", "\nports: {a: b}\n", []string{"line 2: json: cannot unmarshal number a into Go struct field sample.ports of type int"}},
		{"unknown", "list:\n- {}\n- what: 1\n", []string{"line 3: list[1].what: unknown field"}},
		{"case", "Name: a\n", []string{"line 1: Name: unknown field, did you mean name?"}},
		{"twice", "name: a\nlabels:\n  a: true\n  a: false\nname: b\n", []string{
			"line 4: labels[a]: given twice, first on line 3", "line 5: name: given twice, first on line 1"}},
		{"types", "name: 1\nlong: 1.5\nsmall: 2147483648\nbits: -1\nrate: fast\non: yes\nlist: 3\nlabels: []\n", []string{
			"line 1: name: expected a string, found the number 1: put it in quotes",
			"line 2: long: expected a whole number of 64 bits, found the number 1.5",
			"line 3: small: expected a whole number of 32 bits, found the number 2147483648",
			"line 4: bits: expected a whole number from 0, of 32 bits, found the number -1",
			`line 5: rate: expected a number of 32 bits, found the string "fast"`,
			`line 6: on: expected true or false, found the string "yes"`,
			"line 7: list: expected a list, found the number 3",
			"line 8: labels: expected an object, found a list"}},
		{"beyond a float", "rate: 1e39\n", []string{"line 1: rate: expected a number of 32 bits, found the number 1e39"}},
		{"durations", "wait: 30\nlater: soon\nlist: [{wait: {}}]\n", []string{
			"line 1: wait: expected a duration such as 30s or 1h30m, found the number 30",
			`line 2: later: expected a duration such as 30s or 1h30m, found the string "soon"`,
			"line 3: list[0].wait: expected a duration such as 30s or 1h30m, found an object"}},
		{"a duration of null is none to its decoder", "wait: null\n", []string{"line 1: wait: expected a duration such as 30s or 1h30m, found null"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			docs, err := Documents("a.yaml", []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			wrong, _ := docs[0].Decode(new(sample))
			for _, e := range wrong {
				got = append(got, e.Error())
			}
			if d := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("mistakes (-want +got):\n%s", d)
			}
		})
	}
}

func TestNearest(t *testing.T) {
	kinds := []string{"Service", "EndpointSlice", "Endpoints", "Node", "List"}
	for word, want := range map[string]string{
		"Servce": "Service", "service": "Service", "Svc": "", "Services": "Service", "Endpoint": "Endpoints", "EndpointSlcie": "EndpointSlice",
		"Pod": "", "Deployment": "", "Secret": "", "ServiceAccount": "", "ConfigMap": "", "Nod": "Node", "Lisst": "List", "": "",
		"Ingress": "", "Noed": "Node",
	} {
		if got := Nearest(word, kinds...); got != want {
			t.Errorf("%q is nearest to %q, want %q", word, got, want)
		}
	}
	if got := Nearest("stauts", "run", "status", "trace"); got != "status" {
		t.Errorf("stauts: %q", got)
	}
	if got := DidYouMean("Servce", kinds...) + DidYouMean("Pod", kinds...); got != ", did you mean Service?" {
		t.Errorf("the message is %q", got)
	}
}
