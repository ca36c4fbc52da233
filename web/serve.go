package web

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Time limits of one HTTP connection. They bound what a client that stalls can
// hold; event streams extend the write limit as they go.
const (
	headerTimeout   = 5 * time.Second
	readTimeout     = 15 * time.Second
	writeTimeout    = 30 * time.Second
	idleTimeout     = time.Minute
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
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnState:         follow,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close() // the grace is over
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", ln.Addr(), err)
	}
	return nil
}
