package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"kproxy.dev/kproxy/web"
)

// podAPI is an API server that has one pod, and what its ephemeral container comes to.
type podAPI struct {
	refusal string // of the container, status 403
	state   core.ContainerState
	phase   core.PodPhase
	printed string

	added core.EphemeralContainer
}

func (a *podAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	var p core.Pod
	p.Status.Phase = a.phase
	switch {
	case r.Method == http.MethodPatch && r.URL.Path == "/api/v1/namespaces/shop/pods/web/ephemeralcontainers" && a.refusal != "":
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(meta.Status{TypeMeta: meta.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: meta.StatusFailure, Code: http.StatusForbidden, Reason: meta.StatusReasonForbidden, Message: a.refusal})
		return
	case r.Method == http.MethodPatch && r.URL.Path == "/api/v1/namespaces/shop/pods/web/ephemeralcontainers":
		var patch core.Pod
		if err := json.NewDecoder(r.Body).Decode(&patch); err == nil && len(patch.Spec.EphemeralContainers) == 1 {
			a.added = patch.Spec.EphemeralContainers[0]
		}
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/shop/pods/web":
		p.Status.EphemeralContainerStatuses = []core.ContainerStatus{{Name: "kproxy-trace-other", State: core.ContainerState{Terminated: &core.ContainerStateTerminated{ExitCode: 9}}}, {Name: a.added.Name, State: a.state}}
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces/shop/pods/web/log" && r.URL.Query().Get("container") == a.added.Name:
		fmt.Fprint(w, a.printed)
		return
	default:
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(p)
}

// A command in a pod is an ephemeral container, whose failures say what it takes.
func TestInPod(t *testing.T) {
	ended := func(status int32) core.ContainerState {
		return core.ContainerState{Terminated: &core.ContainerStateTerminated{ExitCode: status}}
	}
	waiting := func(reason, message string) core.ContainerState {
		return core.ContainerState{Waiting: &core.ContainerStateWaiting{Reason: reason, Message: message}}
	}
	for name, tc := range map[string]struct {
		api  podAPI
		want string // in the error; empty for none
	}{
		"it works":              {podAPI{state: ended(0), printed: "{}\n"}, ""},
		"a right is missing":    {podAPI{refusal: `pods "web" is forbidden: User "u" cannot patch resource "pods/ephemeralcontainers" in API group "" in the namespace "shop"`}, `"pods/ephemeralcontainers" in API group "" in the namespace "shop" (deploy/plugin has roles`},
		"Pod Security":          {podAPI{refusal: `pods "web" is forbidden: violates PodSecurity "baseline:latest": non-default capabilities`}, "Pod Security of namespace shop forbids a container that reads the rules of netfilter: pods"},
		"no image":              {podAPI{state: waiting("ErrImagePull", "not found")}, "it doesn't start: ErrImagePull: not found"},
		"the pod ends":          {podAPI{state: waiting("ContainerCreating", ""), phase: core.PodSucceeded}, "the pod has ended (Succeeded)"},
		"it never starts":       {podAPI{state: waiting("ContainerCreating", "")}, "hasn't ended within"},
		"an older kproxy":       {podAPI{state: ended(2), printed: "kproxy: there is no flag --in-pod (kproxy trace --help)"}, "there is no flag --in-pod"},
		"the command fails":     {podAPI{state: ended(3), printed: "kproxy: read sets: no"}, "read sets: no"},
		"it can't be executed":  {podAPI{state: core.ContainerState{Terminated: &core.ContainerStateTerminated{ExitCode: 128, Message: "exec: no such file"}}}, "exec: no such file"},
		"a container of before": {podAPI{state: core.ContainerState{Running: &core.ContainerStateRunning{}}}, "hasn't ended within"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(&tc.api)
			defer server.Close()
			api, err := corev1.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
			if err != nil {
				t.Fatal(err)
			}
			c := &Cluster{core: api, timeout: 10 * time.Second}
			patience := 20 * time.Second
			if strings.Contains(tc.want, "within") {
				patience = time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			out, err := c.InPod(ctx, Node{image: "registry.example/kproxy:v1"}, Pod{Namespace: "shop", Name: "web"}, "trace", "--in-pod")
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) || errors.Is(err, web.ErrUnknown) != (name == "an older kproxy") {
					t.Errorf("%q, %v, want an error with %q", out, err, tc.want)
				}
				return
			}
			if err != nil || out != tc.api.printed {
				t.Errorf("%q, %v, want what it printed", out, err)
			}
			a := tc.api.added
			if got, want := fmt.Sprintln(a.Image, a.Command, a.SecurityContext.Capabilities.Drop, a.SecurityContext.Capabilities.Add, a.SecurityContext.Privileged),
				"registry.example/kproxy:v1 [/usr/local/bin/kproxy trace --in-pod] [ALL] [NET_ADMIN NET_RAW] <nil>\n"; got != want {
				t.Errorf("container %s, want %s", got, want)
			}
		})
	}
}
