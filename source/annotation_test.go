package source

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/service"
)

func annotated(protocol service.Protocol, annotations map[string]string) service.Port {
	p := service.Port{Key: service.Key{Protocol: protocol}, Retries: -1, Responses: -1}
	annotate(&p, annotations)
	annotateProtocol(&p)
	return p
}

func TestAnnotationValues(t *testing.T) {
	set := func(f func(*service.Port)) func(*service.Port) { return f }
	nothing := func(*service.Port) {}
	type result struct {
		port    func(*service.Port)
		problem string
	}
	good := func(f func(*service.Port)) result { return result{set(f), ""} }
	algorithm := func(a service.Algorithm) func(*service.Port) {
		return func(p *service.Port) { p.Algorithm, p.AlgorithmGiven = a, true }
	}
	scheduler := func(name string) func(*service.Port) {
		return func(p *service.Port) { p.Scheduler = name }
	}
	bad := func(problem string) result { return result{nothing, problem} }
	const probe = "is not a duration (such as 500ms or 2s) from 1ms to 1h0m0s"
	const wait = "is not a duration (such as 500ms or 2s) from 1ms to 10s"
	const noScheduler = "is not the name of a scheduler of IPVS, such as wlc or sed"
	const rise = "is not a whole number from 1 to 1000"
	cases := map[string]map[string]result{
		"algorithm": {
			"round-robin":          good(algorithm(service.RoundRobin)),
			"weighted-round-robin": good(algorithm(service.WeightedRoundRobin)),
			"least-connections":    good(algorithm(service.LeastConnections)),
			"random":               good(algorithm(service.Random)),
			"source-hash":          good(algorithm(service.SourceHash)),
			"maglev":               good(algorithm(service.Maglev)),
			"Maglev":               bad(`kproxy.dev/algorithm: "Maglev" is not one of round-robin, weighted-round-robin, least-connections, random, source-hash, maglev`),
			"":                     bad(`kproxy.dev/algorithm: "" is not one of round-robin, weighted-round-robin, least-connections, random, source-hash, maglev`),
		},
		"ipvs-scheduler": {
			"wlc":              good(scheduler("wlc")),
			"my_own-sched-15":  good(scheduler("my_own-sched-15")),
			"my_own-sched--16": bad(`kproxy.dev/ipvs-scheduler: "my_own-sched--16" ` + noScheduler),
			"WLC":              bad(`kproxy.dev/ipvs-scheduler: "WLC" ` + noScheduler),
			"rr; reboot":       bad(`kproxy.dev/ipvs-scheduler: "rr; reboot" ` + noScheduler),
			"":                 bad(`kproxy.dev/ipvs-scheduler: "" ` + noScheduler),
		},
		"dataplane": {
			"auto":      good(func(p *service.Port) { p.Prefer = service.PreferAuto }),
			"userspace": good(func(p *service.Port) { p.Prefer = service.PreferUserspace }),
			"kernel":    good(func(p *service.Port) { p.Prefer = service.PreferKernel }),
			"ipvs":      bad(`kproxy.dev/dataplane: "ipvs" is not one of auto, userspace, kernel`),
		},
		"health-check": {
			"off":  good(func(p *service.Port) { p.Health.Kind = service.CheckOff }),
			"tcp":  good(func(p *service.Port) { p.Health.Kind = service.CheckTCP }),
			"http": good(func(p *service.Port) { p.Health.Kind = service.CheckHTTP }),
			"udp":  good(func(p *service.Port) { p.Health.Kind = service.CheckUDP }),
			"grpc": good(func(p *service.Port) { p.Health.Kind = service.CheckGRPC }),
			"icmp": bad(`kproxy.dev/health-check: "icmp" is not one of off, tcp, http, udp, grpc`),
		},
		"health-path": {
			"/a":     bad("kproxy.dev/health-path: only http and grpc checks have a path"),
			"/a b":   bad(`kproxy.dev/health-path: "/a b" is not a path (or gRPC service name) without spaces of at most 1024 bytes`),
			"/a\r\n": bad(`kproxy.dev/health-path: "/a\r\n" is not a path (or gRPC service name) without spaces of at most 1024 bytes`),
			"":       bad(`kproxy.dev/health-path: "" is not a path (or gRPC service name) without spaces of at most 1024 bytes`),
		},
		"health-port": {
			"1":     good(func(p *service.Port) { p.Health.Port = 1 }),
			"65535": good(func(p *service.Port) { p.Health.Port = 65535 }),
			"0":     bad(`kproxy.dev/health-port: "0" is not a whole number from 1 to 65535`),
			"65536": bad(`kproxy.dev/health-port: "65536" is not a whole number from 1 to 65535`),
			"http":  bad(`kproxy.dev/health-port: "http" is not a whole number from 1 to 65535`),
		},
		"health-interval": {
			"2s":  good(func(p *service.Port) { p.Health.Interval = 2 * time.Second }),
			"2":   bad(`kproxy.dev/health-interval: "2" ` + probe),
			"0s":  bad(`kproxy.dev/health-interval: "0s" ` + probe),
			"-1s": bad(`kproxy.dev/health-interval: "-1s" ` + probe),
			"2h":  bad(`kproxy.dev/health-interval: "2h" ` + probe),
		},
		"health-timeout": {
			"500ms": good(func(p *service.Port) { p.Health.Timeout = 500 * time.Millisecond }),
			"soon":  bad(`kproxy.dev/health-timeout: "soon" ` + wait),
			"1h":    bad(`kproxy.dev/health-timeout: "1h" ` + wait),
		},
		"health-rise": {
			"1":  good(func(p *service.Port) { p.Health.Rise = 1 }),
			"0":  bad(`kproxy.dev/health-rise: "0" ` + rise),
			"1.": bad(`kproxy.dev/health-rise: "1." ` + rise),
		},
		"health-fall": {
			"1000": good(func(p *service.Port) { p.Health.Fall = 1000 }),
			"1001": bad(`kproxy.dev/health-fall: "1001" ` + rise),
		},
		"proxy-protocol": {
			"v1": good(func(p *service.Port) { p.ProxyProtocol = 1 }),
			"v2": good(func(p *service.Port) { p.ProxyProtocol = 2 }),
			"2":  bad(`kproxy.dev/proxy-protocol: "2" is not one of v1, v2`),
		},
		"connect-timeout": {
			"5m":   good(func(p *service.Port) { p.ConnectTimeout = 5 * time.Minute }),
			"5m1s": bad(`kproxy.dev/connect-timeout: "5m1s" is not a duration (such as 500ms or 2s) from 1ms to 5m0s`),
		},
		"retries": {
			"0":  good(func(p *service.Port) { p.Retries = 0 }),
			"10": good(func(p *service.Port) { p.Retries = 10 }),
			"-1": bad(`kproxy.dev/retries: "-1" is not a whole number from 0 to 10`),
			"11": bad(`kproxy.dev/retries: "11" is not a whole number from 0 to 10`),
		},
		"idle-timeout": {
			"720h":  good(func(p *service.Port) { p.IdleTimeout = 720 * time.Hour }),
			"never": bad(`kproxy.dev/idle-timeout: "never" is not a duration (such as 500ms or 2s) from 1ms to 720h0m0s`),
		},
		"udp-responses": {
			"0":  good(func(p *service.Port) { p.Responses = 0 }),
			"2":  good(func(p *service.Port) { p.Responses = 2 }),
			"-1": bad(`kproxy.dev/udp-responses: "-1" is not a whole number from 0 to 1000`),
		},
		"weights": {
			"10.2.0.2=1": bad(`kproxy.dev/weights: "10.2.0.2=1" is an annotation of EndpointSlices, not of Services`),
		},
		"algoritm": {
			"maglev": bad("kproxy.dev/algoritm: kproxy has no such annotation, did you mean kproxy.dev/algorithm?"),
		},
	}
	for name, values := range cases {
		for value, c := range values {
			want := service.Port{Key: service.Key{Protocol: service.TCP}, Retries: -1, Responses: -1}
			c.port(&want)
			if c.problem != "" {
				want.Problems = []string{c.problem}
			}
			got := annotated(service.TCP, map[string]string{AnnotationPrefix + name: value})
			if diff := cmp.Diff(want, got, compareNetip); diff != "" {
				t.Errorf("%s: %q (-want +got):\n%s", name, value, diff)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(setters)) {
		if cases[name] == nil {
			t.Errorf("annotation %s has no case in this table", name)
		}
	}
}

func TestAnnotationsTogether(t *testing.T) {
	cases := map[string]struct {
		in   map[string]string
		want service.Port
	}{
		"path of an http check": {
			map[string]string{"kproxy.dev/health-check": "http", "kproxy.dev/health-path": "/ok?x=1"},
			service.Port{Health: service.HealthCheck{Kind: service.CheckHTTP, Path: "/ok?x=1"}},
		},
		"path of an http check without its slash": {
			map[string]string{"kproxy.dev/health-check": "http", "kproxy.dev/health-path": "ok"},
			service.Port{Health: service.HealthCheck{Kind: service.CheckHTTP},
				Problems: []string{`kproxy.dev/health-path: "ok" does not begin with /`}},
		},
		"service of a grpc check": {
			map[string]string{"kproxy.dev/health-check": "grpc", "kproxy.dev/health-path": "shop.Cart"},
			service.Port{Health: service.HealthCheck{Kind: service.CheckGRPC, Path: "shop.Cart"}},
		},
		"every problem, sorted by annotation": {
			map[string]string{"kproxy.dev/retries": "x", "kproxy.dev/dataplane": "x", "kproxy.dev/health-rise": "2"},
			service.Port{Health: service.HealthCheck{Rise: 2}, Problems: []string{
				`kproxy.dev/dataplane: "x" is not one of auto, userspace, kernel`,
				`kproxy.dev/retries: "x" is not a whole number from 0 to 10`,
			}},
		},
		"others' annotations": {map[string]string{"example.com/retries": "x", "kproxy.dev": "x"}, service.Port{}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.want.Protocol, c.want.Retries, c.want.Responses = service.TCP, -1, -1
			if diff := cmp.Diff(c.want, annotated(service.TCP, c.in), compareNetip); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseWeights(t *testing.T) {
	cases := map[string]struct {
		want  weights
		error string
	}{
		"10.2.0.2=3":                {want: weights{ips("10.2.0.2")[0]: 3}},
		" 10.2.0.2 = 3 , fd00::2=0": {want: weights{ips("10.2.0.2")[0]: 3, ips("fd00::2")[0]: 0}},
		"010.2.0.2=1000":            {want: weights{ips("10.2.0.2")[0]: 1000}},
		"":                          {error: `"" is not ADDRESS=WEIGHT`},
		"10.2.0.2=3,":               {error: `"" is not ADDRESS=WEIGHT`},
		"10.2.0.2":                  {error: `"10.2.0.2" is not ADDRESS=WEIGHT`},
		"web=3":                     {error: `"web" is not an IP address`},
		"10.2.0.2=":                 {error: `weight "" of 10.2.0.2 is not a whole number from 0 to 1000`},
		"10.2.0.2=1001":             {error: `weight "1001" of 10.2.0.2 is not a whole number from 0 to 1000`},
		"10.2.0.2=1,010.2.0.2=2":    {error: `10.2.0.2 is named twice`},
	}
	for in, c := range cases {
		got, err := parseWeights(in)
		message := ""
		if err != nil {
			message = err.Error()
		}
		if diff := cmp.Diff(c.want, got, compareNetip); diff != "" || message != c.error {
			t.Errorf("%q: %q, want %q (-want +got):\n%s", in, message, c.error, diff)
		}
	}
}

// Weights that aren't allowed count for nothing, and the Service says so.
func TestBadWeightsAreAProblemOfTheService(t *testing.T) {
	s := Build(objects(t, `
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.1, ports: [{name: a, port: 80}, {name: b, port: 81}]}
---
kind: EndpointSlice
metadata:
  name: web-1
  namespace: default
  labels: {kubernetes.io/service-name: web}
  annotations: {kproxy.dev/weights: "10.2.0.2=5,10.2.0.3=x"}
addressType: IPv4
ports: [{name: a, port: 8080}]
endpoints: [{addresses: [10.2.0.2]}]
`), "n")
	want := []string{`kproxy.dev/weights of EndpointSlice web-1: weight "x" of 10.2.0.3 is not a whole number from 0 to 1000`}
	for p, eps := range s.All() {
		if diff := cmp.Diff(want, p.Problems); diff != "" {
			t.Errorf("%v (-want +got):\n%s", p.Key, diff)
		}
		for _, e := range eps {
			if e.Weight != 1 {
				t.Errorf("%v has weight %d, want 1", e.Address, e.Weight)
			}
		}
	}
	if s.Len() != 2 {
		t.Errorf("%d service ports, want 2", s.Len())
	}
}

// Whatever an annotation says, the Service is served, within bounds.
func FuzzAnnotations(f *testing.F) {
	for name := range setters {
		f.Add(name, "v1")
	}
	f.Add("weights", "10.2.0.2=3,fd00::2=0")
	f.Add("health-interval", "2s")
	f.Add("retries", "99999999999999999999")
	f.Fuzz(func(t *testing.T, name, value string) {
		p := annotated(service.UDP, map[string]string{AnnotationPrefix + name: value})
		if !slices.Contains(append(service.Algorithms, ""), p.Algorithm) || p.Retries < -1 || p.Retries > maxRetries ||
			p.ProxyProtocol != 0 || p.Health.Interval < 0 || p.Health.Rise < 0 || p.IdleTimeout < 0 || p.Responses < -1 || p.Responses > maxResponses {
			t.Errorf("%s=%q gives %+v", name, value, p)
		}
		if w, err := parseWeights(value); err == nil {
			for a, n := range w {
				if !a.IsValid() || n > service.MaxWeight {
					t.Errorf("%q gives %v weight %d", value, a, n)
				}
			}
		}
		svc := corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
		svc.Annotations = map[string]string{AnnotationPrefix + name: value}
		if got := Build(Objects{Services: []*corev1.Service{&svc}}, "n").Len(); got != 1 {
			t.Errorf("%s=%q: %d service ports", name, value, got)
		}
	})
}

// TestLongAnnotations: whoever may write a Service or an EndpointSlice can't make kproxy keep and print more than a little of it.
func TestLongAnnotations(t *testing.T) {
	long := strings.Repeat("é\n", 50_000)
	annotations := map[string]string{}
	for name := range setters {
		annotations[AnnotationPrefix+name] = long
	}
	for i := range 3000 {
		annotations[fmt.Sprintf("%swrong-%d", AnnotationPrefix, i)] = long
	}
	var be backing
	for i := range 100 {
		be.slices = append(be.slices, &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("web-%d", i), Annotations: map[string]string{AnnotationPrefix + annotationWeights: long},
		}})
	}
	var b service.Builder
	addService(&b, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", Annotations: annotations},
		Spec:       corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.10"}, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
	}, be, "")
	of, _, _ := b.Build().At(0)
	text := strings.Join(of.Problems, "\n")
	all := len(annotated(service.TCP, annotations).Problems) + len(be.slices)
	if len(text) > 8000 || len(of.Problems) != maxProblems+1 || of.Problems[maxProblems] != fmt.Sprintf("annotations: %d more problems", all-maxProblems) {
		t.Errorf("%d problems of %d bytes, of %d: %.500s", len(of.Problems), len(text), all, text)
	}
	if !strings.Contains(text, `"é\né\n`) || !strings.Contains(text, `…" (150000 bytes)`) || strings.Contains(text, "é\n") {
		t.Errorf("values are quoted as %.500s", text)
	}
}
