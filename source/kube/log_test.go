package kube

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

// TestLog: client-go's messages come at level debug, and none of those that show
// what requests hold.
func TestLog(t *testing.T) {
	for _, at := range []slog.Level{slog.LevelDebug, slog.LevelInfo} {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: at}))
		ctx := withLogger(t.Context(), log)
		klog.FromContext(ctx).Info("a watch begins")
		klog.FromContext(ctx).V(8).Info("a body")
		got := out.String()
		if shown := strings.Contains(got, "level=DEBUG msg=\"a watch begins\""); shown != (at == slog.LevelDebug) || strings.Contains(got, "body") {
			t.Errorf("at level %s the log is %q", at, got)
		}
	}
}
