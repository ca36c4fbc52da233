package kube

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
)

// TestWhatIsSaidOfEvents: once that they can't be written and once that they can
// again, and nothing of those whose namespace is on its way out.
func TestWhatIsSaidOfEvents(t *testing.T) {
	kind := schema.GroupResource{Group: "events.k8s.io", Resource: "events"}
	terminating := apierrors.NewForbidden(kind, "web.1", errors.New("namespace shop is being terminated"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause, Field: "metadata.namespace"}}
	away, forbidden, gone := errors.New("connection refused"), apierrors.NewForbidden(kind, "web.1", errors.New("no rights")), apierrors.NewNotFound(kind, "web.1")
	const cant, again = "events can't be written", "events are written again"
	for _, tt := range []struct {
		name string
		errs []error
		want []string
	}{
		{"all is well", []error{nil, nil}, nil},
		{"the server is away", []error{away, away, nil, nil, away}, []string{cant, again, cant}},
		{"no rights", []error{forbidden, forbidden}, []string{cant}},
		{"a namespace is being deleted", []error{nil, terminating, nil, terminating, terminating, nil}, nil},
		{"it has been", []error{gone, nil, gone}, nil},
		{"meanwhile the server is away", []error{away, terminating, gone, nil}, []string{cant, again}},
	} {
		var log bytes.Buffer
		s := &sink{log: slog.New(slog.NewTextHandler(&log, nil))}
		for _, err := range tt.errs {
			if got := s.saw(context.Background(), err); !errors.Is(got, err) {
				t.Errorf("%s: %v became %v", tt.name, err, got)
			}
		}
		var got []string
		for line := range strings.Lines(log.String()) {
			for _, said := range []string{cant, again} {
				if strings.Contains(line, said) {
					got = append(got, said)
				}
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// seenEvents is a recorder of events that remembers what they are about.
type seenEvents []string

func (s *seenEvents) Eventf(regarding, _ runtime.Object, kind, reason, _, _ string, _ ...any) {
	r := regarding.(*corev1.ObjectReference)
	*s = append(*s, strings.Join([]string{r.Kind, r.Namespace, r.Name, kind, reason}, " "))
}

func (s *seenEvents) WithLogger(klog.Logger) events.EventRecorderLogger { return s }

// TestEventsAboutNode: an event that names no Service is about the node.
func TestEventsAboutNode(t *testing.T) {
	var got seenEvents
	var to events.EventRecorderLogger = &got
	r := newRecorder(nil, "n1", func(name) types.UID { return "uid" }, slog.New(slog.DiscardHandler))
	r.to.Store(&to)
	r.event(name{}, true, "NodeIsolated", "EjectNothing", "this node seems to be cut off")
	r.event(name{Namespace: "default", Name: "web"}, false, "EndpointBack", "Uneject", "10.2.0.2:80 gets connections again")
	if diff := cmp.Diff(seenEvents{"Node  n1 Warning NodeIsolated", "Service default web Normal EndpointBack"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
