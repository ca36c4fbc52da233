package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
)

const (
	// inPodWait bounds the wait for a container in a pod: for its start, and what it runs.
	inPodWait = 90 * time.Second
	inPodPoll = 500 * time.Millisecond
)

// InPod runs a kproxy command in the network namespace of a pod, and returns what it printed. It goes by an ephemeral
// container with the image of node's kproxy, which stays in the pod's record once it has ended. It may read and change rules
// of that namespace, and nothing else. A command that fails is an [*ExitError].
func (c *Cluster) InPod(ctx context.Context, n Node, p Pod, args ...string) (string, error) {
	name := "kproxy-trace-" + rand.String(5)
	what := fmt.Sprintf("run container %s in pod %s/%s", name, p.Namespace, p.Name)
	ctx, cancel := context.WithTimeout(ctx, inPodWait)
	defer cancel()
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"ephemeralContainers": []core.EphemeralContainer{inPod(name, n.image, args)}}})
	if err != nil {
		return "", err
	}
	_, err = c.core.Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, patch, meta.PatchOptions{}, "ephemeralcontainers")
	switch {
	case err != nil && strings.Contains(err.Error(), "violates PodSecurity"):
		return "", fmt.Errorf("%s: Pod Security of namespace %s forbids a container that reads the rules of netfilter: %w", what, p.Namespace, err)
	case err != nil:
		return "", c.inWords(what, err)
	}
	ended, err := c.awaitEnd(ctx, p, name)
	if errors.Is(err, context.DeadlineExceeded) {
		return "", fmt.Errorf("%s: it hasn't ended within %s", what, inPodWait)
	} else if err != nil {
		return "", c.inWords(what, err)
	}
	limit := int64(outputAtMost)
	printed, err := c.core.Pods(p.Namespace).GetLogs(p.Name, &core.PodLogOptions{Container: name, LimitBytes: &limit}).DoRaw(ctx)
	switch {
	case err != nil:
		return "", c.inWords(what+": read what it printed", err)
	case ended.ExitCode != 0:
		message := strings.TrimSpace(string(printed) + "\n" + ended.Message)
		return "", fmt.Errorf("%s: %w", what, exitError(int(ended.ExitCode), message))
	}
	return string(printed), nil
}

// inPod is the container: user 0 without its powers, as in the DaemonSet, and nothing of the pod's volumes.
func inPod(name, image string, args []string) core.EphemeralContainer {
	root, no, yes := int64(0), false, true
	return core.EphemeralContainer{EphemeralContainerCommon: core.EphemeralContainerCommon{
		Name: name, Image: image, ImagePullPolicy: core.PullIfNotPresent, Command: append([]string{"/usr/local/bin/kproxy"}, args...),
		SecurityContext: &core.SecurityContext{
			RunAsUser: &root, RunAsNonRoot: &no, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			SeccompProfile: &core.SeccompProfile{Type: core.SeccompProfileTypeRuntimeDefault},
			// NET_RAW is for the legacy variant of iptables, which reads rules through a raw socket.
			Capabilities: &core.Capabilities{Drop: []core.Capability{"ALL"}, Add: []core.Capability{"NET_ADMIN", "NET_RAW"}},
		},
	}}
}

// awaitEnd waits for the end of an ephemeral container, and fails where it can't begin.
func (c *Cluster) awaitEnd(ctx context.Context, p Pod, name string) (*core.ContainerStateTerminated, error) {
	for {
		pod, err := c.core.Pods(p.Namespace).Get(ctx, p.Name, meta.GetOptions{})
		if err != nil {
			return nil, err
		}
		for i := range pod.Status.EphemeralContainerStatuses {
			s := &pod.Status.EphemeralContainerStatuses[i]
			if w := s.State.Waiting; s.Name == name && w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
				return nil, fmt.Errorf("it doesn't start: %s", strings.TrimSuffix(w.Reason+": "+w.Message, ": "))
			}
			if s.Name == name && s.State.Terminated != nil {
				return s.State.Terminated, nil
			}
		}
		if phase := pod.Status.Phase; phase == core.PodSucceeded || phase == core.PodFailed {
			return nil, fmt.Errorf("the pod has ended (%s)", phase)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(inPodPoll):
		}
	}
}
