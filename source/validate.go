package source

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// FieldError is one field of one object that can't be as it is.
type FieldError struct {
	Field   string // as in "spec.ports[0].port"; a map's key stands in brackets too
	Message string
}

// Error returns "field: message".
func (e FieldError) Error() string { return e.Field + ": " + e.Message }

// Validate returns everything that an API server would refuse of object, as
// far as it matters to a service proxy, in the order of the fields. It expects
// an object that Default has seen. Annotations are no errors here: a value
// that isn't allowed becomes a sentence in service.Port.Problems.
func Validate(object metav1.Object) []FieldError {
	var v validator
	v.object(object)
	switch o := object.(type) {
	case *corev1.Service:
		v.service(o)
	case *discoveryv1.EndpointSlice:
		v.endpointSlice(o)
	case *Endpoints:
		v.endpoints(o)
	case *corev1.Node:
		v.node(o)
	}
	return v.errors
}

// validator collects errors. Its methods take the path of the field they check.
type validator struct{ errors []FieldError }

func (v *validator) fail(field, format string, args ...any) {
	v.errors = append(v.errors, FieldError{Field: field, Message: fmt.Sprintf(format, args...)})
}

// object checks the names. They reach chain comments and log lines, so what
// isn't a name in Kubernetes is refused before it gets there.
func (v *validator) object(o metav1.Object) {
	switch o.(type) {
	case *corev1.Service:
		v.label("metadata.name", o.GetName())
	default:
		v.subdomain("metadata.name", o.GetName())
	}
	if ns := o.GetNamespace(); ns != "" {
		v.label("metadata.namespace", ns)
	}
}

func (v *validator) label(field, name string) {
	if name == "" {
		v.fail(field, "missing")
	} else if len(validation.IsDNS1123Label(name)) > 0 {
		v.fail(field, "%q is not a name: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit", name)
	}
}

func (v *validator) subdomain(field, name string) {
	if name == "" {
		v.fail(field, "missing")
	} else if len(validation.IsDNS1123Subdomain(name)) > 0 {
		v.fail(field, "%q is not a name: lower-case letters, digits, '-' and '.', at most 253, beginning and ending with a letter or digit", name)
	}
}

// portName checks a name that only several ports of one object need.
func (v *validator) portName(field, name string, of int) {
	switch {
	case name != "":
		v.label(field, name)
	case of > 1:
		v.fail(field, "missing, and needed where there is more than one port")
	}
}

// once fails where key, which what describes, is in seen already, and puts it there with
// the item that has it.
func (v *validator) once(seen map[string]string, key, item, field, what string) {
	if first, dup := seen[key]; dup {
		v.fail(field, "%s is used by %s too", what, first)
		return
	}
	seen[key] = item
}

func (v *validator) port(field string, n int32) {
	if n < 1 || n > 65535 {
		v.fail(field, "%d is not a port number from 1 to 65535", n)
	}
}

// optionalPort allows 0 for none.
func (v *validator) optionalPort(field string, n int32) {
	if n != 0 {
		v.port(field, n)
	}
}

func (v *validator) protocol(field string, p corev1.Protocol) {
	choice(v, field, p, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

// choice checks that value is one of allowed; a missing value is fine.
func choice[T ~string](v *validator, field string, value T, allowed ...T) {
	if value == "" {
		return
	}
	if _, err := oneOf(string(value), allowed...); err != nil {
		v.fail(field, "%q is %v", value, err)
	}
}

// address checks an address that packets are sent to. The exclusions are those
// of the API (ValidateNonSpecialIP).
func (v *validator) address(field, s string) (netip.Addr, bool) {
	a, err := ParseAddr(s)
	if err != nil {
		v.fail(field, "%v", err)
		return a, false
	}
	if what := special(a); what != "" {
		v.fail(field, "%s is %s, which no service or endpoint can have", s, what)
		return a, false
	}
	return a, true
}

// special says what a is that no service or endpoint can be at, or "".
func special(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "unspecified"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	}
	return ""
}

func (v *validator) prefix(field, s string) {
	if _, err := ParsePrefix(s); err != nil {
		v.fail(field, "%v", err)
	}
}

// item is the path of element i of the list at path, or of a field below it.
func item(path string, i int, sub ...string) string {
	return strings.Join(append([]string{fmt.Sprintf("%s[%d]", path, i)}, sub...), ".")
}
