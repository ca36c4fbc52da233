package file

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/source"
)

// newObject returns an empty object of a kind that kproxy reads.
type newObject func() metav1.Object

// kinds are the kinds that kproxy reads.
var kinds = map[metav1.TypeMeta]newObject{
	{APIVersion: "v1", Kind: "Service"}:                        func() metav1.Object { return new(corev1.Service) },
	{APIVersion: "v1", Kind: "Endpoints"}:                      func() metav1.Object { return new(source.Endpoints) },
	{APIVersion: "v1", Kind: "Node"}:                           func() metav1.Object { return new(corev1.Node) },
	{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}: func() metav1.Object { return new(discoveryv1.EndpointSlice) },
}

// listOf returns the kind of a list's items: the empty one for a v1 List, whose
// items name their own, and false for what isn't a list of kinds read here.
func listOf(t metav1.TypeMeta) (item metav1.TypeMeta, ok bool) {
	if t == (metav1.TypeMeta{APIVersion: "v1", Kind: "List"}) {
		return metav1.TypeMeta{}, true
	}
	kind, isList := strings.CutSuffix(t.Kind, "List")
	item = metav1.TypeMeta{APIVersion: t.APIVersion, Kind: kind}
	_, known := kinds[item]
	return item, isList && known
}

// nearMiss says what was probably meant by a kind that doesn't exist but
// differs only in case, or in the API version, from one that kproxy reads. To
// skip it like any foreign kind would hide the slip.
func nearMiss(t metav1.TypeMeta) (string, bool) {
	for k := range kinds {
		if !strings.EqualFold(k.Kind, t.Kind) {
			continue
		}
		if k.APIVersion == t.APIVersion {
			return fmt.Sprintf("kind %s doesn't exist, did you mean %s?", t.Kind, k.Kind), true
		}
		if t.APIVersion == "v1" || t.APIVersion == "discovery.k8s.io/v1" {
			return fmt.Sprintf("%s has no kind %s, did you mean apiVersion %s, kind %s?", t.APIVersion, t.Kind, k.APIVersion, k.Kind), true
		}
	}
	return "", false
}
