package file

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/strict"
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

// nearMiss says what was probably meant by a kind that doesn't exist, but is
// written almost like one that kproxy reads, or has another's API version. To
// skip it like any foreign kind would hide the slip. Other groups have kinds of
// the same names: only a slip in the group's name is one then.
func nearMiss(t metav1.TypeMeta) (string, bool) {
	known := slices.SortedFunc(maps.Keys(kinds), func(a, b metav1.TypeMeta) int { return strings.Compare(a.Kind, b.Kind) })
	var names, versions []string
	for _, k := range known {
		names, versions = append(names, k.Kind), append(versions, k.APIVersion)
	}
	kind, list := strings.CutSuffix(t.Kind, "List")
	suffix := ""
	if list {
		suffix = "List"
	}
	at := slices.Index(names, strict.Nearest(kind, names...))
	switch {
	case at < 0 && t.APIVersion == "v1" && strict.Nearest(t.Kind, "List") != "":
		return fmt.Sprintf("kind %s doesn't exist, did you mean List?", t.Kind), true
	case at < 0:
		return "", false
	}
	meant := known[at]
	switch exact := meant.Kind == kind; {
	case meant.APIVersion == t.APIVersion:
		return fmt.Sprintf("kind %s doesn't exist, did you mean %s?", t.Kind, meant.Kind+suffix), true
	case slices.Contains(versions, t.APIVersion), exact && group(t) != group(meant) && strict.Nearest(t.APIVersion, meant.APIVersion) != "":
		return fmt.Sprintf("%s has no kind %s, did you mean apiVersion %s, kind %s?", t.APIVersion, t.Kind, meant.APIVersion, meant.Kind+suffix), true
	}
	return "", false
}

func group(t metav1.TypeMeta) string { return path.Dir(t.APIVersion) }
