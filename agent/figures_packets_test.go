package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/kernel"
)

// counter is a plane that counts.
type counter struct {
	kernel.Plane
	read func() (kernel.Counts, error)
}

func (c counter) Counts(context.Context) (kernel.Counts, error) { return c.read() }

func TestPacketsOutliveTheirRule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var count uint64
		var failed error
		p := &programmer{plane: counter{read: func() (kernel.Counts, error) { return kernel.Counts{Steered: count}, failed }}}
		a := &Agent{programmer: p, log: slog.New(slog.DiscardHandler)}
		for _, tt := range []struct {
			count  uint64
			failed error
			want   uint64
		}{{5, nil, 5}, {7, nil, 7}, {0, errors.New("busy"), 7}, {2, nil, 9}, {2, nil, 9}, {0, nil, 9}, {3, nil, 12}} {
			count, failed = tt.count, tt.failed
			if got := a.countPackets().Steered; got != tt.want {
				t.Errorf("the rule counted %d (%v): got %d, want %d", tt.count, tt.failed, got, tt.want)
			}
			time.Sleep(countsAge)
		}
	})
}
