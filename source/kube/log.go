package kube

import (
	"context"
	"log/slog"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// LogTo has client-go write its log, which otherwise goes to stderr in a format
// of its own, to log at level debug: kproxy says itself what matters of it. The
// setting is the whole process's; it is to be made before anything runs.
func LogTo(log *slog.Logger) { klog.SetSlogLogger(slog.New(quiet{log.Handler()})) }

// withLogger does the same for what runs with ctx.
func withLogger(ctx context.Context, log *slog.Logger) context.Context {
	return klog.NewContext(ctx, logr.FromSlogHandler(quiet{log.Handler()}))
}

// quiet is a handler for which everything is for debugging.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, _ slog.Level) bool {
	return q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(a []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(a)} }
func (q quiet) WithGroup(g string) slog.Handler      { return quiet{q.Handler.WithGroup(g)} }
