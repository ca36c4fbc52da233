package kube

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// health is how one watch is doing. Safe for concurrent use.
type health struct {
	kind      string // "Services"
	optional  bool   // an API that has none, or forbids it, is no error
	log       *slog.Logger
	recovered func() // called when it works, at first and after it didn't

	mu     sync.Mutex
	worked bool
	during string // "list" or "watch", what fails; empty while it works
	since  time.Time
	err    error
}

// The requests of a watch.
const (
	listing  = "list"
	watching = "watch"
)

// note takes the outcome of a request. A watch that fails is mended by a watch
// that works, not by the list that comes before it.
func (h *health) note(ctx context.Context, request string, err error) {
	if ctx.Err() != nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // told to stop, or to ask for everything again: neither is a failure
	}
	if err != nil {
		h.fails(request, err)
		return
	}
	h.works(request)
}

func (h *health) fails(request string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == "" {
		h.since = time.Now()
		if h.optional && absent(err) {
			h.log.Info("the Kubernetes API doesn't give them; going on without", "kind", h.kind, "error", plain(err))
		} else {
			h.log.Warn("watch failed; what it said last stays in force", "kind", h.kind, "error", plain(err))
		}
	}
	h.during, h.err = request, err
}

func (h *health) works(request string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == watching && request == listing {
		return
	}
	was := h.during
	if was != "" {
		h.log.Info("watch works again", "kind", h.kind, "after", time.Since(h.since).Round(time.Millisecond))
	}
	if was != "" || !h.worked {
		h.recovered()
	}
	h.worked, h.during, h.err = true, "", nil
}

// problem returns a line about what fails, empty while nothing does.
func (h *health) problem() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == "" || h.optional && absent(h.err) {
		return ""
	}
	return fmt.Sprintf("%s: %s fails since %s: %s", h.kind, h.during, h.since.UTC().Format(time.RFC3339), plain(h.err))
}

// absent reports whether err says that the API has no such objects, or none
// for kproxy.
func absent(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }
