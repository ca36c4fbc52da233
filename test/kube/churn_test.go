package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// The churn: so many Services are made by so many clients, each of which then
// takes so many random steps with its own.
const (
	churned  = 500
	churners = 4
	steps    = 100
)

// TestChurn makes, changes and deletes 500 Services at random while clients
// use others, which nobody touches. In the middle the API server is killed and
// comes back, and kproxy is restarted, killed, and comes back. No request fails,
// and in the end the node is programmed as by a kproxy that starts afresh.
func TestChurn(t *testing.T) {
	mode := plan.ModeIPTables
	if chosen := modes(); !slices.Contains(chosen, mode) {
		mode = chosen[0]
	}
	w := newWorld(t, mode)
	untouched := w.create(newService("untouched", nil), newSlices("untouched", w.net.Backends[:3]...)...)
	w.change("untouched", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	w.run()
	w.everywhere(untouched, "b1", "b2", "b3")
	w.eventually("the untouched service in the kernel", func() error { return w.offloaded("untouched") })
	targets := append(frontends(untouched), w.nodePort(w.change("untouched", func(*corev1.Service) {}))[0])
	var traffic []*lab.Traffic
	for _, target := range targets {
		traffic = append(traffic, w.traffic(target, 30))
	}

	c := &churn{w: w}
	c.run("make", churned/churners, (*churner).make)
	c.run("change", steps/2, (*churner).step)
	c.disturbed("change while the API server dies", func() {
		w.must(w.API.Kill())
		w.must(w.API.Start())
		w.must(w.Await(w.ctx))
	})
	c.disturbed("change while kproxy restarts", func() {
		w.must(w.proxy.Stop(patience))
		w.start()
		w.awaitAlive()
		w.eventually("the untouched service in the kernel", func() error { return w.offloaded("untouched") })
		time.Sleep(time.Second) // requests that userspace carries end
		w.must(w.proxy.Kill())
		w.start()
		w.awaitAlive()
	})
	w.awaitSettled()
	for i, tr := range traffic {
		w.noneFailed(fmt.Sprintf("untouched at %s", targets[i]), tr.Stop())
	}
	c.sample(30)

	have := w.programmed()
	w.must(w.proxy.Stop(patience))
	w.node(binary, "cleanup", "--state-dir", w.File("state"))
	if left := w.programmed(); left != "" {
		t.Errorf("cleanup has left:\n%s", left)
	}
	w.start()
	w.awaitAlive()
	w.awaitSettled()
	if diff := cmp.Diff(w.programmed(), have); diff != "" {
		t.Errorf("programmed, as by a fresh start (-) and after the churn (+):\n%.20000s", diff)
	}
}

// churn is clients that change the API's objects at random.
type churn struct {
	w        *world
	churners [churners]*churner
	requests atomic.Int64
}

// churner is one client, and the Services that are its own.
type churner struct {
	*churn
	rand     *rand.Rand
	name     string
	services []string
	made     int
}

// run has every client take steps, all at a time.
func (c *churn) run(what string, n int, step func(*churner) error) {
	c.w.Helper()
	began, before := time.Now(), c.requests.Load()
	var all sync.WaitGroup
	errs := make([]error, churners)
	for i := range c.churners {
		if c.churners[i] == nil {
			c.churners[i] = &churner{churn: c, rand: rand.New(rand.NewPCG(1, uint64(i))), name: fmt.Sprintf("churn-%d", i)}
		}
		all.Go(func() {
			for range n {
				if errs[i] = step(c.churners[i]); errs[i] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	c.w.must(errors.Join(errs...))
	c.w.Logf("%s: %d requests in %s", what, c.requests.Load()-before, time.Since(began).Round(time.Millisecond))
}

// disturbed has the clients take random steps for as long as f runs.
func (c *churn) disturbed(what string, f func()) {
	c.w.Helper()
	var over atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.run(what, steps, func(one *churner) error {
			if over.Load() {
				return nil
			}
			time.Sleep(20 * time.Millisecond) // some remain for the end
			return one.step()
		})
	}()
	defer func() { <-done }()
	defer over.Store(true)
	f()
}

// try repeats a request while there is no API server, and takes for done what
// a request before it did that was never answered.
func (c *churner) try(request func() error) error {
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		c.requests.Add(1)
		err := request()
		var status apierrors.APIStatus
		switch {
		case err == nil, apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
			return nil
		case errors.As(err, &status) && !apierrors.IsServiceUnavailable(err) && !apierrors.IsInternalError(err) &&
			!apierrors.IsTooManyRequests(err) && !apierrors.IsConflict(err) && !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) && !apierrors.IsForbidden(err):
			return err
		case time.Since(start) > patience:
			return fmt.Errorf("tried for %s: %w", patience, err)
		}
	}
}

// make makes a Service with random endpoints.
func (c *churner) make() error {
	name := fmt.Sprintf("%s-%d", c.name, c.made)
	c.made++
	s := newService(name, nil)
	if c.rand.IntN(4) > 0 {
		s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	}
	if c.rand.IntN(8) == 0 {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	w := c.w
	err := c.try(func() error {
		_, err := w.client.core.Services(namespace).Create(w.ctx, s, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	c.services = append(c.services, name)
	for _, slice := range newSlices(name, c.backends()...)[:families(s)] {
		err = errors.Join(err, c.try(func() error {
			_, err := w.client.discovery.EndpointSlices(namespace).Create(w.ctx, slice, metav1.CreateOptions{})
			return err
		}))
	}
	return err
}

// families returns how many slices a Service has: one a family.
func families(s *corev1.Service) int {
	if *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack {
		return 1
	}
	return 2
}

// backends are up to four at random.
func (c *churner) backends() []*lab.Backend {
	var out []*lab.Backend
	for _, i := range c.rand.Perm(pods)[:c.rand.IntN(5)] {
		out = append(out, c.w.net.Backends[i])
	}
	return out
}

// step deletes, makes or changes a Service or its endpoints.
func (c *churner) step() error {
	w, ctx := c.w, c.w.ctx
	i := c.rand.IntN(len(c.services))
	name := c.services[i]
	services, endpoints := w.client.core.Services(namespace), w.client.discovery.EndpointSlices(namespace)
	switch c.rand.IntN(6) {
	case 0:
		c.services = append(c.services[:i], c.services[i+1:]...)
		return c.try(func() error { return services.Delete(ctx, name, metav1.DeleteOptions{}) })
	case 1:
		return c.make()
	case 2, 3, 4: // endpoints, as they change most
		next := newSlices(name, c.backends()...)[0]
		return c.try(func() error {
			_, err := endpoints.Update(ctx, next, metav1.UpdateOptions{})
			return err
		})
	default:
		change := []func(*corev1.Service){
			func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort },
			func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 },
			func(s *corev1.Service) {
				s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "another"}
			},
			func(s *corev1.Service) { s.Labels = nil },
			func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) },
		}[c.rand.IntN(5)]
		return c.try(func() error {
			s, err := services.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(s)
			_, err = services.Update(ctx, s, metav1.UpdateOptions{})
			return err
		})
	}
}

// awaitSettled waits until the status shows what the API holds, and everything
// is where it will stay.
func (w *world) awaitSettled() {
	w.Helper()
	began := time.Now()
	var steady uint64
	var since time.Time
	w.eventually("the status to show what the API holds", func() error {
		want, err := w.wanted()
		if err != nil {
			return err
		}
		st, err := w.status.Status(w.ctx)
		if err != nil {
			return err
		}
		if diff := cmp.Diff(want, shown(st)); diff != "" {
			return fmt.Errorf("want - have +:\n%.4000s", diff)
		}
		for _, s := range st.Services {
			if s.DataPlane == plan.Userspace {
				return fmt.Errorf("%s is in userspace: %s", s.Name, s.Reason)
			}
		}
		if st.Sync.LastError != "" {
			return errors.New(st.Sync.LastError)
		}
		if st.Sync.Generation != steady {
			steady, since = st.Sync.Generation, time.Now()
		}
		if time.Since(since) < time.Second {
			return errors.New("it still changes")
		}
		return nil
	})
	w.Logf("settled after %s", time.Since(began).Round(time.Millisecond))
}

func (w *world) offloaded(service string) error {
	st, err := w.status.Status(w.ctx)
	if err != nil {
		return err
	}
	for _, s := range st.Services {
		if s.Name == service && s.State == plan.StateOffloaded {
			return nil
		}
		if s.Name == service {
			return fmt.Errorf("it is %s: %s", s.State, s.Reason)
		}
	}
	return errors.New("it isn't there")
}

// sample asks some of the Services that are left, at all of their addresses.
func (c *churn) sample(n int) {
	w := c.w
	w.Helper()
	endpoints := w.client.discovery.EndpointSlices(namespace)
	for i := range n {
		owner := c.churners[i%churners]
		name := owner.services[owner.rand.IntN(len(owner.services))]
		s, err := w.client.core.Services(namespace).Get(w.ctx, name, metav1.GetOptions{})
		w.must(err)
		list, err := endpoints.List(w.ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
		w.must(err)
		w.exact(s, list.Items)
	}
}

// exact asks a Service once and compares with what its objects say.
func (w *world) exact(s *corev1.Service, list []discoveryv1.EndpointSlice) {
	w.Helper()
	names := map[string]bool{}
	for _, slice := range list {
		for _, e := range slice.Endpoints {
			for _, b := range w.net.Backends {
				names[b.Name] = names[b.Name] || slice.AddressType == discoveryv1.AddressTypeIPv4 && b.Addresses[0].String() == e.Addresses[0]
			}
		}
	}
	target := frontends(s)[0]
	ctx, cancel := context.WithTimeout(w.ctx, time.Second)
	defer cancel()
	a, err := w.net.Client.Ask(ctx, "tcp", target, "hello")
	some := false
	for _, is := range names {
		some = some || is
	}
	served := some && s.Labels == nil && s.Spec.Ports[0].Port == 80
	switch {
	case served && err != nil:
		w.Errorf("%s at %s: %v, want an answer", s.Name, target, err)
	case served && !names[a.Backend]:
		w.Errorf("%s at %s: answered by %s, want one of %v", s.Name, target, a.Backend, names)
	case !served && err == nil:
		w.Errorf("%s at %s: answered by %s, want no answer", s.Name, target, a.Backend)
	}
}
