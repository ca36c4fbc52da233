package kube

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// TestTriggers: what led to a change counts once, by family, when the change is
// in a Snapshot; not what was before this process, nor what the controller
// doesn't say.
func TestTriggers(t *testing.T) {
	start := time.Unix(1e9, 0).UTC()
	slice := func(family discoveryv1.AddressType, text string) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{AddressType: family}
		if text != "" {
			s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: text}
		}
		return s
	}
	text := func(d time.Duration) string { return start.Add(d).Format(time.RFC3339Nano) }
	const v4, v6 = discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6
	tr := triggers{since: start}
	for _, change := range []struct{ was, is *discoveryv1.EndpointSlice }{
		{nil, slice(v4, text(time.Second))},
		{slice(v4, text(time.Second)), slice(v4, text(time.Second))}, // another change
		{slice(v4, text(time.Second)), slice(v4, text(time.Second+time.Millisecond))},
		{slice(v4, ""), slice(v6, text(2*time.Second))},
		{nil, slice(v6, text(0))},
		{nil, slice(v6, "yesterday")},
		{nil, slice(v6, "")},
		{nil, slice(discoveryv1.AddressTypeFQDN, text(time.Second))},
	} {
		tr.changed(change.was, change.is)
	}
	if diff := cmp.Diff([2][]time.Time{}, tr.drain()); diff != "" {
		t.Errorf("before there is a Snapshot (-want +got):\n%s", diff)
	}
	tr.converted(tr.take())
	want := [2][]time.Time{{start.Add(time.Second), start.Add(time.Second + time.Millisecond)}, {start.Add(2 * time.Second)}}
	if diff := cmp.Diff(want, tr.drain()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([2][]time.Time{}, tr.drain()); diff != "" {
		t.Errorf("a second time (-want +got):\n%s", diff)
	}
}
