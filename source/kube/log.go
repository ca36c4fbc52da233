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

// quiet is a handler for which everything is for debugging, and what is even
// finer for nobody: from klog's level 6 on client-go writes every request, and from
// 8 on what is in it, secrets too. Level n of klog is slog's -n (logr).
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelDebug && q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(a []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(a)} }
func (q quiet) WithGroup(g string) slog.Handler      { return quiet{q.Handler.WithGroup(g)} }
