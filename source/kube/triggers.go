package kube

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"kproxy.dev/kproxy/service"
)

// triggers are the times at which pods changed that led to changes of
// EndpointSlices, by the controller's annotation
// endpoints.kubernetes.io/last-change-trigger-time. Safe for concurrent use.
type triggers struct {
	since time.Time // earlier ones say nothing about this process

	mu      sync.Mutex
	waiting [2][]time.Time // by family: not in a Snapshot yet
	ready   [2][]time.Time // in the current Snapshot
}

// changed records what led to is. A slice that changes without a new time
// changed for another reason, such as a hint or a label.
func (t *triggers) changed(was, is *discoveryv1.EndpointSlice) {
	text := is.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if text == "" || was != nil && was.Annotations[corev1.EndpointsLastChangeTriggerTime] == text {
		return
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil || !at.After(t.since) {
		return
	}
	f := service.IPv4
	switch is.AddressType {
	case discoveryv1.AddressTypeIPv4:
	case discoveryv1.AddressTypeIPv6:
		f = service.IPv6
	default:
		return // host names, which have no rules
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting[f] = append(t.waiting[f], at)
}

// take returns what waits, to be handed to converted.
func (t *triggers) take() (taken [2][]time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	taken, t.waiting = t.waiting, [2][]time.Time{}
	return taken
}

// converted: the Snapshot that taken led to is current.
func (t *triggers) converted(taken [2][]time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for f := range taken {
		t.ready[f] = append(t.ready[f], taken[f]...)
	}
}

// drain returns, once, what has been converted.
func (t *triggers) drain() (out [2][]time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	out, t.ready = t.ready, [2][]time.Time{}
	return out
}
