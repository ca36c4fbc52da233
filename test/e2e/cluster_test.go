package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/lab"
)

// cluster is an API server on the node, as far as kproxy's lists and watches go, with the Services that manifests
// describe. It can be away. What a real one does beyond is tested with a real one, in test/kube.
type cluster struct {
	w       *world
	address string

	mu      sync.Mutex
	server  *http.Server // nil while it is away
	version int
	objects map[string]map[string]map[string]any // by resource and name
	more    chan struct{}                        // closed when something changes
}

func (w *world) newCluster() *cluster {
	w.Helper()
	c := &cluster{w: w, address: "127.0.0.1:6443", version: 1, objects: map[string]map[string]map[string]any{}, more: make(chan struct{})}
	w.must(c.start())
	w.Cleanup(c.stop)
	return c
}

func (c *cluster) start() error {
	l, err := c.w.net.Node.Listen(c.w.ctx, "tcp", c.address)
	if err != nil {
		return err
	}
	s := &http.Server{Handler: c, ReadHeaderTimeout: time.Minute}
	c.mu.Lock()
	c.server = s
	c.mu.Unlock()
	go func() { _ = s.Serve(l) }() // until stop
	return nil
}

// stop breaks every connection and refuses new ones.
func (c *cluster) stop() {
	c.mu.Lock()
	s := c.server
	c.server = nil
	c.mu.Unlock()
	if s != nil {
		s.Close()
	}
}

// set changes the Service and the EndpointSlices of a manifest, or makes them.
func (c *cluster) set(m lab.Manifest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, text := range strings.Split(m.YAML(), "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			return err
		}
		c.version++
		resource := strings.ToLower(o["kind"].(string)) + "s"
		meta := o["metadata"].(map[string]any)
		meta["resourceVersion"] = fmt.Sprint(c.version)
		if c.objects[resource] == nil {
			c.objects[resource] = map[string]map[string]any{}
		}
		c.objects[resource][meta["name"].(string)] = o
	}
	close(c.more)
	c.more = make(chan struct{})
	return nil
}

// ServeHTTP answers lists and watches. None of the objects is ever deleted.
func (c *cluster) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	kinds := map[string][2]string{"services": {"v1", "ServiceList"}, "endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"}, "nodes": {"v1", "NodeList"}}
	kind, known := kinds[resource]
	out.Header().Set("Content-Type", "application/json")
	answer := json.NewEncoder(out)
	switch {
	case !known:
		out.WriteHeader(http.StatusNotFound)
	case r.FormValue("sendInitialEvents") != "": // of servers since Kubernetes 1.32
		out.WriteHeader(http.StatusUnprocessableEntity)
		_ = answer.Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": http.StatusUnprocessableEntity})
	case r.FormValue("watch") == "":
		items, version, _ := c.after(resource, 0)
		_ = answer.Encode(map[string]any{"apiVersion": kind[0], "kind": kind[1], "metadata": map[string]any{"resourceVersion": fmt.Sprint(version)}, "items": items})
	default:
		var from int
		_, _ = fmt.Sscan(r.FormValue("resourceVersion"), &from)
		for {
			items, version, more := c.after(resource, from)
			for _, o := range items {
				_ = answer.Encode(map[string]any{"type": "MODIFIED", "object": o})
			}
			out.(http.Flusher).Flush()
			from = version
			select {
			case <-more:
			case <-r.Context().Done():
				return
			}
		}
	}
}

// after are the objects that have changed since a version, as of the version that it returns, and what is closed when more do.
func (c *cluster) after(resource string, version int) (items []map[string]any, now int, more chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	items = []map[string]any{}
	for _, o := range c.objects[resource] {
		var of int
		_, _ = fmt.Sscan(o["metadata"].(map[string]any)["resourceVersion"].(string), &of)
		if of > version {
			items = append(items, o) // never changed, but replaced
		}
	}
	return items, c.version, c.more
}
