package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kproxy.dev/kproxy/web"
)

// State says how a node stands that was asked, in a word or two.
type State string

// The states of nodes that don't answer. One that does has the words of its own kproxy.
const (
	Absent    State = "absent"    // no kproxy runs there
	Forbidden State = "forbidden" // the user lacks a right
	TimedOut  State = "timed out" // kproxy, the kubelet or what is between hangs
	Older     State = "older"     // its kproxy doesn't know the question
	Failed    State = "failed"
	Unasked   State = "not asked yet" // on a board
)

// Trouble says why a node didn't answer.
type Trouble struct {
	State State
	Text  string
}

func (t *Trouble) Error() string { return string(t.State) + ": " + t.Text }

// troubleOf sorts an error of a node that was waited for so long; nil for nil.
func troubleOf(err error, timeout time.Duration) *Trouble {
	if err == nil {
		return nil
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	switch {
	case isForbidden(err):
		return &Trouble{Forbidden, denied(err).Error()}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return &Trouble{TimedOut, fmt.Sprintf("not within %s", timeout)}
	case errors.Is(err, web.ErrUnknown):
		return &Trouble{Older, text}
	case strings.Contains(text, "connection refused") && strings.Contains(text, fmt.Sprintf(":%d", apiPort)): // of the kubelet's end of a port forward, as text only
		return &Trouble{Failed, fmt.Sprintf("nothing answers on port %d of the node's loopback, where kproxy has its metrics unless metricsBindAddress says otherwise: %s", apiPort, text)}
	}
	return &Trouble{Failed, text}
}

// isForbidden also knows a denial that came as text only: an upgraded connection's.
func isForbidden(err error) bool {
	return apierrors.IsForbidden(err) || strings.Contains(err.Error(), " is forbidden: User ")
}

// isGone reports whether a node's pod isn't there any more; so too where that came as text only.
func isGone(err error) bool {
	return apierrors.IsNotFound(err) || strings.Contains(err.Error(), "pods ") && strings.HasSuffix(err.Error(), " not found")
}

// denied says what a denial takes besides the right that the API server names in it.
func denied(err error) error {
	return fmt.Errorf("%w (deploy/plugin has roles with the rights)", err)
}

// inWords says of an error what was tried, and what it takes.
func (c *Cluster) inWords(what string, err error) error {
	switch {
	case isForbidden(err):
		return fmt.Errorf("%s: %w", what, denied(err))
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: the API server doesn't answer within %s", what, c.timeout)
	}
	return fmt.Errorf("%s: %w", what, err)
}
