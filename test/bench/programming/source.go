package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientcache "k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// source is where proxies learn of services.
type source interface {
	// args tell a proxy where that is.
	args(s subject) []string
	// move gives a movable service its endpoint at a side.
	move(ctx context.Context, i, side int) error
	// told is when a watcher of the source, other than the proxy, learned of the
	// last move of a service; false if it hasn't yet.
	told(i int) (time.Time, bool)
	close()
}

// apiSource is an API server, with a watch of its own.
type apiSource struct {
	*cluster
	world
	stop context.CancelFunc

	mu      sync.Mutex // the watch writes, cases read
	written map[string]string
	seen    map[string]event
}

type event struct {
	version string
	at      time.Time
}

func newAPISource(ctx context.Context, c *cluster, w world) (*apiSource, error) {
	s := &apiSource{cluster: c, world: w, written: map[string]string{}, seen: map[string]event{}}
	ctx, s.stop = context.WithCancel(ctx)
	list, err := c.discovery.EndpointSlices(namespace).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	// An API server ends a watch after half an hour to an hour; this one goes on.
	changes, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &clientcache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.discovery.EndpointSlices(namespace).Watch(ctx, o)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch slices: %w", err)
	}
	go func() {
		for e := range changes.ResultChan() {
			if slice, ok := e.Object.(*discoveryv1.EndpointSlice); ok {
				s.mu.Lock()
				s.seen[slice.Name] = event{slice.ResourceVersion, time.Now()}
				s.mu.Unlock()
			}
		}
	}()
	return s, nil
}

func (s *apiSource) args(subject) []string { return []string{"--kubeconfig", s.kubeconfig()} }

func (s *apiSource) move(ctx context.Context, i, side int) error {
	now, err := s.put(ctx, s.slice(i, side))
	if err != nil {
		return fmt.Errorf("move %s: %w", serviceName(i), err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written[now.Name] = now.ResourceVersion
	return nil
}

func (s *apiSource) told(i int) (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := serviceName(i)
	e := s.seen[name]
	return e.at, e.version == s.written[name]
}

func (s *apiSource) close() { s.stop() }

// manifestSource is files in a folder: many services in each, and each movable
// one in two of its own, so that a change is a small file.
type manifestSource struct {
	world
	dir   string
	moved map[int]time.Time
}

// perFile is how many services share a file.
const perFile = 100

func newManifestSource(dir string, w world) (*manifestSource, error) {
	s := &manifestSource{world: w, dir: dir, moved: map[int]time.Time{}}
	for first := 0; first < w.services; first += perFile {
		var objects []runtime.Object
		for i := first; i < min(first+perFile, w.services); i++ {
			objects = append(objects, w.service(i))
			if !w.isMovable(i) {
				objects = append(objects, w.slice(i, 0))
			} else if err := s.write(serviceName(i)+"-endpoints.json", w.slice(i, 0)); err != nil {
				return nil, err
			}
		}
		if err := s.write(fmt.Sprintf("services-%05d.json", first), objects...); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// write writes a file as a whole: what a reader opens is complete.
func (s *manifestSource) write(name string, objects ...runtime.Object) error {
	list := corev1.List{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}}
	for _, o := range objects {
		list.Items = append(list.Items, runtime.RawExtension{Object: o})
	}
	text, err := json.Marshal(list)
	if err != nil {
		return fmt.Errorf("encode manifests: %w", err)
	}
	partly := filepath.Join(filepath.Dir(s.dir), "partly")
	if err := os.WriteFile(partly, text, 0o644); err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	return os.Rename(partly, filepath.Join(s.dir, name))
}

// args also turn active checks off, which are the default for manifests and not
// what is measured.
func (s *manifestSource) args(subject) []string {
	return []string{"--manifests", s.dir, "--health-check", "off"}
}

func (s *manifestSource) move(_ context.Context, i, side int) error {
	err := s.write(serviceName(i)+"-endpoints.json", s.slice(i, side))
	s.moved[i] = time.Now()
	return err
}

func (s *manifestSource) told(i int) (time.Time, bool) { return s.moved[i], true }

func (s *manifestSource) close() {}
