package web

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Time limits of one HTTP connection. They bound what a client that stalls can
// hold; event streams extend the write limit as they go.
const (
	headerTimeout   = 5 * time.Second
	readTimeout     = 15 * time.Second
	writeTimeout    = 30 * time.Second
	idleTimeout     = time.Minute
	readGrace       = time.Second // for requests that are on their way
	shutdownTimeout = 2 * time.Second
	maxHeaderBytes  = 16 << 10
)

// Serve answers requests on ln with h until ctx is done. It closes ln, gives
// requests in progress a moment to finish, and returns when all have ended; nil
// unless serving failed. The contexts of requests end with ctx. It takes every
// connection: listeners that outsiders reach are for [Connections.Serve].
func Serve(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger) error {
	return serve(ctx, ln, h, log, nil)
}

func serve(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger, follow func(net.Conn, http.ConnState)) error {
	fresh := unread{conns: map[net.Conn]bool{}}
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnState: func(c net.Conn, s http.ConnState) {
			fresh.follow(c, s)
			if follow != nil {
				follow(c, s)
			}
		},
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	// A server that shuts down drops what it has accepted and not read yet, which another kproxy that
	// took over would have answered.
	_ = ln.Close()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", ln.Addr(), err)
	}
	fresh.wait(readGrace)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close() // the grace is over
	}
	return nil
}

// unread are the connections of a server of which it hasn't read anything yet. Safe for concurrent use.
type unread struct {
	mu    sync.Mutex
	conns map[net.Conn]bool
}

func (u *unread) follow(c net.Conn, s http.ConnState) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s == http.StateNew {
		u.conns[c] = true
	} else {
		delete(u.conns, c)
	}
}

// wait waits until there are none, for a time at most.
func (u *unread) wait(most time.Duration) {
	const look = 20 * time.Millisecond // once more than needed: what is read is a request a moment later
	for end := time.Now().Add(most); time.Now().Before(end); {
		u.mu.Lock()
		left := len(u.conns)
		u.mu.Unlock()
		time.Sleep(look)
		if left == 0 {
			return
		}
	}
}
