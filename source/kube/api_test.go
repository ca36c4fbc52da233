package kube

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
)

// api is an API server as far as lists and watches go: objects with resource
// versions, watches that go on from one, and ways to fail. What a real one does
// beyond is tested with a real one, in test/kube.
type api struct {
	t       *testing.T
	address string

	mu       sync.Mutex
	server   *httptest.Server // nil while it is down
	version  int
	objects  map[string]map[name]metav1.Object // by resource
	changes  []change                          // all there ever were
	more     chan struct{}                     // closed when there is a change
	refuse   map[string]int                    // by resource: the status of every answer
	oldest   int                               // watches from before are ended with 410
	asked    map[string][]string               // by resource: the selectors asked for
	opened   map[string]int                    // by resource: how many watches were opened
	events   []eventsv1.Event
	counted  int  // one more of an event, how often
	noStream bool // doesn't know sendInitialEvents, as servers before Kubernetes 1.32
}

type change struct {
	version  int
	resource string
	kind     string // ADDED, MODIFIED, DELETED
	object   metav1.Object
}

var apiVersions = map[string]metav1.TypeMeta{
	"services":       {APIVersion: "v1", Kind: "Service"},
	"endpointslices": {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
	"nodes":          {APIVersion: "v1", Kind: "Node"},
	"servicecidrs":   {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
}

func newAPI(t *testing.T) *api {
	a := &api{t: t, version: 1, more: make(chan struct{}), refuse: map[string]int{},
		objects: map[string]map[name]metav1.Object{}, asked: map[string][]string{}, opened: map[string]int{}}
	t.Cleanup(a.stop)
	return a
}

// start listens, on the same address every time.
func (a *api) start() {
	a.t.Helper()
	var lc net.ListenConfig
	address := a.address
	if address == "" {
		address = "127.0.0.1:0"
	}
	l, err := lc.Listen(a.t.Context(), "tcp", address)
	if err != nil {
		a.t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: a}}
	s.Start()
	a.mu.Lock()
	a.server, a.address = s, l.Addr().String()
	a.mu.Unlock()
}

// stop breaks every connection and refuses new ones.
func (a *api) stop() {
	a.mu.Lock()
	s := a.server
	a.server = nil
	a.mu.Unlock()
	if s != nil {
		s.Listener.Close()
		s.CloseClientConnections()
		s.Close()
	}
}

// set changes an object, or makes it.
func (a *api) set(resource string, o metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	o.SetResourceVersion(fmt.Sprint(a.version))
	if a.objects[resource] == nil {
		a.objects[resource] = map[name]metav1.Object{}
	}
	kind := "ADDED"
	if _, there := a.objects[resource][nameOf(o)]; there {
		kind = "MODIFIED"
	}
	a.objects[resource][nameOf(o)] = o
	a.changed(resource, kind, o)
}

func (a *api) remove(resource string, k name) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if o, there := a.objects[resource][k]; there {
		a.version++
		delete(a.objects[resource], k)
		a.changed(resource, "DELETED", o)
	}
}

func (a *api) changed(resource, kind string, o metav1.Object) {
	a.changes = append(a.changes, change{a.version, resource, kind, o})
	close(a.more)
	a.more = make(chan struct{})
}

// answer sets what every request for resource is answered; 0 for the truth.
func (a *api) answer(resource string, status int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuse[resource] = status
}

// forget has every watch from before now end at once with an event that says
// 410, as the watch cache of a server that was restarted has it.
func (a *api) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.oldest = a.version
}

// watches returns how many watches of resource were opened so far.
func (a *api) watches(resource string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.opened[resource]
}

func (a *api) written() []eventsv1.Event {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.events)
}

// ServeHTTP answers as an API server that speaks JSON; it understands protobuf.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	resource := parts[len(parts)-1]
	a.mu.Lock()
	status := a.refuse[resource]
	a.mu.Unlock()
	w.Header().Set("Content-Type", asJSON)
	switch _, known := apiVersions[resource]; {
	case status != 0:
		fail(w, status)
	case r.Method == http.MethodPost && resource == "events":
		a.write(w, r)
	case r.Method == http.MethodPatch: // of an event, to count one more
		a.mu.Lock()
		a.counted++
		a.mu.Unlock()
		encode(w, &eventsv1.Event{TypeMeta: metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"}})
	case !known:
		fail(w, http.StatusNotFound)
	case r.FormValue("watch") != "":
		a.watch(w, r, resource)
	default:
		a.list(w, r, resource)
	}
}

func fail(w http.ResponseWriter, status int) {
	w.WriteHeader(status)
	encode(w, statusOf(status))
}

// statusOf returns what the API says of a failure. Reasons are those of
// apimachinery's errors package.
func statusOf(status int) metav1.Status {
	reason := map[int]metav1.StatusReason{
		http.StatusNotFound: metav1.StatusReasonNotFound, http.StatusForbidden: metav1.StatusReasonForbidden,
		http.StatusGone: metav1.StatusReasonExpired, http.StatusUnprocessableEntity: metav1.StatusReasonInvalid,
		http.StatusInternalServerError: metav1.StatusReasonInternalError, http.StatusTooManyRequests: metav1.StatusReasonTooManyRequests,
	}[status]
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
		Code: int32(status), Reason: reason, Message: "the test says " + fmt.Sprint(status),
	}
}

func encode(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) }

func (a *api) write(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		fail(w, http.StatusInternalServerError)
		return
	}
	o, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil) // protobuf
	e, ok := o.(*eventsv1.Event)
	if err != nil || !ok {
		fail(w, http.StatusInternalServerError)
		return
	}
	a.mu.Lock()
	a.events = append(a.events, *e)
	a.mu.Unlock()
	e.TypeMeta = metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"}
	w.WriteHeader(http.StatusCreated)
	encode(w, e)
}

func (a *api) list(w http.ResponseWriter, r *http.Request, resource string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.note(r, resource)
	typeMeta := apiVersions[resource]
	typeMeta.Kind += "List"
	items := slices.Collect(maps.Values(a.objects[resource]))
	if items == nil {
		items = []metav1.Object{}
	}
	encode(w, map[string]any{
		"apiVersion": typeMeta.APIVersion, "kind": typeMeta.Kind,
		"metadata": map[string]string{"resourceVersion": fmt.Sprint(a.version)}, "items": items,
	})
}

// note remembers the selectors asked for. Called with mu held.
func (a *api) note(r *http.Request, resource string) {
	asked := r.FormValue("labelSelector") + " " + r.FormValue("fieldSelector")
	if !slices.Contains(a.asked[resource], asked) {
		a.asked[resource] = append(a.asked[resource], asked)
	}
}

func (a *api) watch(w http.ResponseWriter, r *http.Request, resource string) {
	var from int
	_, _ = fmt.Sscan(r.FormValue("resourceVersion"), &from)
	stream := r.FormValue("sendInitialEvents") == "true"
	a.mu.Lock()
	a.note(r, resource)
	a.opened[resource]++
	refuse := 0
	if stream && a.noStream {
		refuse = http.StatusUnprocessableEntity
	}
	expired := !stream && from < a.oldest
	var first []any
	if stream {
		for _, o := range a.objects[resource] {
			first = append(first, event("ADDED", resource, o))
		}
		first = append(first, bookmark(resource, a.version))
		from = a.version
	}
	a.mu.Unlock()
	if refuse != 0 {
		fail(w, refuse)
		return
	}
	if expired {
		encode(w, map[string]any{"type": "ERROR", "object": statusOf(http.StatusGone)})
		return
	}
	for _, e := range first {
		encode(w, e)
	}
	a.stream(w, r, resource, from)
}

// stream writes the changes after from until the client goes.
func (a *api) stream(w http.ResponseWriter, r *http.Request, resource string, from int) {
	flush := w.(http.Flusher)
	for {
		a.mu.Lock()
		more, changes := a.more, a.changes
		for _, c := range changes {
			if c.resource == resource && c.version > from {
				encode(w, event(c.kind, resource, c.object))
			}
		}
		from = a.version
		a.mu.Unlock()
		flush.Flush()
		select {
		case <-more:
		case <-r.Context().Done():
			return
		}
	}
}

func event(kind, resource string, o metav1.Object) map[string]any {
	typeMeta := apiVersions[resource]
	switch o := o.(type) {
	case *corev1.Service:
		o.TypeMeta = typeMeta
	case *discoveryv1.EndpointSlice:
		o.TypeMeta = typeMeta
	case *corev1.Node:
		o.TypeMeta = typeMeta
	case *networkingv1.ServiceCIDR:
		o.TypeMeta = typeMeta
	}
	return map[string]any{"type": kind, "object": o}
}

func bookmark(resource string, version int) map[string]any {
	typeMeta := apiVersions[resource]
	return map[string]any{"type": "BOOKMARK", "object": map[string]any{
		"apiVersion": typeMeta.APIVersion, "kind": typeMeta.Kind,
		"metadata": map[string]any{
			"resourceVersion": fmt.Sprint(version),
			"annotations":     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		},
	}}
}
