package source

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/strict"
)

// AnnotationPrefix is common to all of kproxy's annotations.
const AnnotationPrefix = "kproxy.dev/"

// Annotations that messages name too, without their prefix.
const (
	annotationHealthPath    = "health-path"
	annotationProxyProtocol = "proxy-protocol"
	annotationWeights       = "weights"
)

// Bounds of annotation values. They keep a slip of the pen (a time-out in
// hours, a million retries) from taking a service down silently.
const (
	maxRetries    = 10 // each is a connect, for one SYN of a client
	maxResponses  = 1000
	maxRiseFall   = 1000
	maxDial       = 5 * time.Minute
	maxProbe      = time.Hour
	minProbe      = time.Millisecond
	maxWait       = 10 * time.Second // for a probe's answer: one that hangs holds a slot
	maxIdle       = 30 * 24 * time.Hour
	maxHealthPath = 1024
)

// setters holds, for each annotation of a Service, what its value does to a
// port. The error completes the sentence `kproxy.dev/retries: "x" is …`.
var setters = map[string]func(*service.Port, string) error{
	"algorithm": func(p *service.Port, v string) (err error) {
		p.Algorithm, err = oneOf(v, service.Algorithms...)
		p.AlgorithmGiven = err == nil
		return err
	},
	"ipvs-scheduler": func(p *service.Port, v string) error {
		if !service.IsScheduler(v) {
			return fmt.Errorf("not the name of a scheduler of IPVS, such as wlc or sed")
		}
		p.Scheduler = v
		return nil
	},
	"dataplane": setOneOf(func(p *service.Port) *service.Preference { return &p.Prefer },
		service.PreferAuto, service.PreferUserspace, service.PreferKernel),
	"health-check": setOneOf(func(p *service.Port) *service.Check { return &p.Health.Kind },
		service.CheckOff, service.CheckTCP, service.CheckHTTP, service.CheckUDP, service.CheckGRPC),
	annotationHealthPath: func(p *service.Port, v string) error {
		if v == "" || len(v) > maxHealthPath || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return fmt.Errorf("not a path (or gRPC service name) without spaces of at most %d bytes", maxHealthPath)
		}
		p.Health.Path = v
		return nil
	},
	"health-port":     setNumber(func(p *service.Port) *uint16 { return &p.Health.Port }, 1, math.MaxUint16),
	"health-interval": setDuration(func(p *service.Port) *time.Duration { return &p.Health.Interval }, maxProbe),
	"health-timeout":  setDuration(func(p *service.Port) *time.Duration { return &p.Health.Timeout }, maxWait),
	"health-rise":     setNumber(func(p *service.Port) *int { return &p.Health.Rise }, 1, maxRiseFall),
	"health-fall":     setNumber(func(p *service.Port) *int { return &p.Health.Fall }, 1, maxRiseFall),
	annotationProxyProtocol: func(p *service.Port, v string) error {
		v, err := oneOf(v, "v1", "v2")
		p.ProxyProtocol = map[string]service.ProxyProtocol{"v1": 1, "v2": 2}[v]
		return err
	},
	"connect-timeout": setDuration(func(p *service.Port) *time.Duration { return &p.ConnectTimeout }, maxDial),
	"retries":         setNumber(func(p *service.Port) *int { return &p.Retries }, 0, maxRetries),
	"idle-timeout":    setDuration(func(p *service.Port) *time.Duration { return &p.IdleTimeout }, maxIdle),
	"udp-responses":   setNumber(func(p *service.Port) *int { return &p.Responses }, 0, maxResponses),
	annotationWeights: func(*service.Port, string) error {
		return fmt.Errorf("an annotation of EndpointSlices, not of Services")
	},
}

// set sets a field to what parse makes of a value, if that is allowed.
func set[T any](field func(*service.Port) *T, parse func(string) (T, error)) func(*service.Port, string) error {
	return func(p *service.Port, v string) error {
		parsed, err := parse(v)
		if err == nil {
			*field(p) = parsed
		}
		return err
	}
}

func setOneOf[T ~string](field func(*service.Port) *T, allowed ...T) func(*service.Port, string) error {
	return set(field, func(v string) (T, error) { return oneOf(v, allowed...) })
}

func setNumber[T int | uint16](field func(*service.Port) *T, low, high int) func(*service.Port, string) error {
	return set(field, func(v string) (T, error) {
		n, err := number(v, low, high)
		return T(n), err
	})
}

func setDuration(field func(*service.Port) *time.Duration, high time.Duration) func(*service.Port, string) error {
	return set(field, func(v string) (time.Duration, error) { return duration(v, minProbe, high) })
}

// annotate sets what the annotations say. One that can't be honoured leaves
// its field as it was and a sentence in p.Problems.
func annotate(p *service.Port, annotations map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name, ours := strings.CutPrefix(key, AnnotationPrefix)
		if !ours {
			continue
		}
		set, known := setters[name]
		if !known {
			p.Problems = append(p.Problems, fmt.Sprintf("%s: kproxy has no such annotation%s", Plain(key), didYouMean(name)))
			continue
		}
		if err := set(p, annotations[key]); err != nil {
			p.Problems = append(p.Problems, fmt.Sprintf("%s: %s is %v", key, quoted(annotations[key]), err))
		}
	}
	checkHealth(p)
}

// Whoever may write a Service writes what its Problems quote, and kproxy keeps, logs and serves those: they are bounded here.
const (
	maxQuoted   = 64 // bytes
	maxProblems = 20 // more than a Service can have without looking for them
)

// quoted returns a text in quotes: of a long one, its beginning and its length in bytes.
func quoted(s string) string {
	if len(s) <= maxQuoted {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q (%d bytes)", strings.ToValidUTF8(s[:maxQuoted], "")+"…", len(s))
}

// Plain returns a name as it is, or quoted where it has what isn't to be printed, as control characters for a terminal.
func Plain(name string) string {
	if strings.IndexFunc(name, func(r rune) bool { return !strconv.IsPrint(r) || r == utf8.RuneError }) >= 0 {
		return strconv.Quote(name)
	}
	return name
}

// few returns the first of all problems, and how many others there are.
func few(problems []string) []string {
	if n := len(problems); n > maxProblems {
		return append(problems[:maxProblems:maxProblems], fmt.Sprintf("annotations: %d more problems", n-maxProblems))
	}
	return problems
}

// didYouMean names the annotation of Services that is written most like name.
func didYouMean(name string) string {
	if n := strict.Nearest(name, slices.Sorted(maps.Keys(setters))...); n != "" {
		return ", did you mean " + AnnotationPrefix + n + "?"
	}
	return ""
}

// CheckAnnotations returns what is wrong with o's annotations: the same
// sentences that end up in the Problems of a service.Port, with the annotation
// that each is about. An object with such annotations is served as without them.
func CheckAnnotations(o metav1.Object) []FieldError {
	var problems []string
	switch o := o.(type) {
	case *corev1.Service:
		if !Serves(o) {
			return nil
		}
		base := service.Port{}
		annotate(&base, o.Annotations)
		problems = base.Problems
		for i := range o.Spec.Ports {
			p, _ := finishPort(base, o, &o.Spec.Ports[i])
			for _, problem := range p.Problems {
				if !slices.Contains(problems, problem) {
					problems = append(problems, problem)
				}
			}
		}
	case *discoveryv1.EndpointSlice:
		if _, problem := sliceWeights(o); problem != "" {
			problems = []string{problem}
		}
	}
	errors := make([]FieldError, len(problems))
	for i, problem := range problems {
		key := problem[:strings.IndexAny(problem, ": ")]
		errors[i] = FieldError{Field: "metadata.annotations[" + key + "]", Message: problem}
	}
	return errors
}

// checkHealth undoes health annotations that contradict each other.
func checkHealth(p *service.Port) {
	h := &p.Health
	switch {
	case h.Kind == service.CheckHTTP && h.Path != "" && !strings.HasPrefix(h.Path, "/"):
		p.Problems = append(p.Problems, fmt.Sprintf("%s: %s does not begin with /", AnnotationPrefix+annotationHealthPath, quoted(h.Path)))
		h.Path = ""
	case h.Path != "" && h.Kind != service.CheckHTTP && h.Kind != service.CheckGRPC:
		p.Problems = append(p.Problems, fmt.Sprintf("%s: only http and grpc checks have a path", AnnotationPrefix+annotationHealthPath))
		h.Path = ""
	}
}

// annotateProtocol undoes what a port of p's protocol can't have.
func annotateProtocol(p *service.Port) {
	if p.ProxyProtocol != 0 && p.Protocol != service.TCP {
		p.ProxyProtocol = 0
		p.Problems = append(slices.Clone(p.Problems),
			fmt.Sprintf("%s: only TCP ports have it, and this one is %s", AnnotationPrefix+annotationProxyProtocol, strings.ToUpper(p.Protocol.String())))
	}
}

func oneOf[T ~string](v string, allowed ...T) (T, error) {
	if slices.Contains(allowed, T(v)) {
		return T(v), nil
	}
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = string(a)
	}
	return "", fmt.Errorf("not one of %s", strings.Join(names, ", "))
}

func number(v string, low, high int) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("not a whole number from %d to %d", low, high)
	}
	return n, nil
}

func duration(v string, low, high time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil || d < low || d > high {
		return 0, fmt.Errorf("not a duration (such as 500ms or 2s) from %v to %v", low, high)
	}
	return d, nil
}

// weights holds what kproxy.dev/weights of one EndpointSlice says; nil for
// nothing.
type weights map[netip.Addr]uint16

func (w weights) of(a netip.Addr) uint16 {
	if n, ok := w[a]; ok {
		return n
	}
	return 1
}

// sliceWeights reads s's weights. A value that isn't allowed is of no effect
// as a whole, and comes back as a sentence.
func sliceWeights(s *discoveryv1.EndpointSlice) (weights, string) {
	value, ok := s.Annotations[AnnotationPrefix+annotationWeights]
	if !ok {
		return nil, ""
	}
	w, err := parseWeights(value)
	if err != nil {
		return nil, fmt.Sprintf("%s of EndpointSlice %s: %v", AnnotationPrefix+annotationWeights, s.Name, err)
	}
	return w, ""
}

// parseWeights reads "10.2.0.2=3,10.2.0.3=1".
func parseWeights(value string) (weights, error) {
	w := weights{}
	for item := range strings.SplitSeq(value, ",") {
		address, weight, ok := strings.Cut(strings.TrimSpace(item), "=")
		if !ok {
			return nil, fmt.Errorf("%s is not ADDRESS=WEIGHT", quoted(item))
		}
		a, err := ParseAddr(strings.TrimSpace(address))
		if err != nil {
			return nil, err
		}
		if _, dup := w[a]; dup {
			return nil, fmt.Errorf("%s is named twice", a)
		}
		n, err := number(strings.TrimSpace(weight), 0, service.MaxWeight)
		if err != nil {
			return nil, fmt.Errorf("weight %s of %s is %w", quoted(weight), a, err)
		}
		w[a] = uint16(n)
	}
	return w, nil
}
