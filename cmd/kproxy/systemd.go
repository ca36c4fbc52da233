package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"time"
)

// notifySystemd tells the service manager (sd_notify(3)) when kproxy is ready for the first
// time, what keeps it from being ready, and, when ctx is done, that it stops. It does nothing where
// kproxy isn't run as a service of Type=notify.
func notifySystemd(ctx context.Context, notReady func() string, log *slog.Logger) {
	const every = 100 * time.Millisecond
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return
	}
	c, err := net.Dial("unixgram", socket) // "@" in front is an abstract name, here and there
	if err != nil {
		log.Warn("the service manager can't be notified", "NOTIFY_SOCKET", socket, "error", err)
		return
	}
	defer c.Close()
	tell := func(state string) {
		if _, err := c.Write([]byte(state)); err != nil {
			log.Warn("the service manager can't be notified", "state", state, "error", err)
		}
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ready, said := false, ""; ; {
		why := notReady()
		state := "STATUS=ready"
		if why != "" {
			state = "STATUS=not ready: " + why
		} else if !ready {
			ready = true
			state = "READY=1\n" + state
		}
		if state != said {
			tell(state)
			said = state
		}
		select {
		case <-ctx.Done():
			tell("STOPPING=1\nSTATUS=draining")
			return
		case <-tick.C:
		}
	}
}
