package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/view"
	"kproxy.dev/kproxy/view/terminal"
	"kproxy.dev/kproxy/web"
)

// watchEvery is how often a watched kproxy is asked.
const watchEvery = time.Second

// canDraw reports whether out is this process's terminal, and one to draw on.
func canDraw(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && terminal.Usable(os.Stdin, f, os.Getenv("TERM"))
}

// model is a screen's content.
type model[T any] interface {
	Update(T, time.Time)
	Fail(error, time.Time)
	Key(view.Key, time.Time) (quit bool)
	Render(now time.Time, width, height int) []string
}

// watchOnScreen draws m on the terminal until the user leaves, and asks for what it shows
// every second, whether or not kproxy is there. Beside, it has feed change m by apply, if
// there is a feed.
func watchOnScreen[T any](ctx context.Context, m model[T], ask func(context.Context) (T, error), feed func(ctx context.Context, apply func(func()))) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	updates := make(chan func())
	apply := func(f func()) {
		select {
		case updates <- f:
		case <-ctx.Done():
		}
	}
	var feeds sync.WaitGroup
	feeds.Go(func() {
		for again := true; again; again = sleep(ctx, watchEvery) {
			answer, err := ask(ctx)
			apply(func() {
				if err != nil {
					m.Fail(err, time.Now())
				} else {
					m.Update(answer, time.Now())
				}
			})
		}
	})
	if feed != nil {
		feeds.Go(func() { feed(ctx, apply) })
	}
	t := terminal.Screen{
		In: os.Stdin, Out: os.Stdout, Updates: updates,
		Draw: func(w, h int) []string { return m.Render(time.Now(), w, h) },
		Key:  func(k view.Key) bool { return m.Key(k, time.Now()) },
	}
	err := t.Run(ctx)
	cancel()
	feeds.Wait()
	return err
}

// watchStatus watches a kproxy on the terminal: its status, and its events, also after a
// restart.
func watchStatus(ctx context.Context, client *web.Client, m *view.Model, status func(context.Context) (plan.Status, error)) error {
	return watchOnScreen(ctx, m, status, func(ctx context.Context, apply func(func())) {
		for again := true; again; again = sleep(ctx, watchEvery) {
			// The status shows why the events ended.
			_ = client.Events(ctx, func() error { return nil }, func(e plan.Event) { apply(func() { m.Event(e) }) })
		}
	})
}

// watchPlainly prints a snapshot every second, for pipes and files. A kproxy
// that doesn't answer any more is a line, as it may come back; one that never
// did is an error.
func watchPlainly[T any](ctx context.Context, out io.Writer, ask func(context.Context) (T, error), show func(io.Writer, T) error) error {
	for first := true; ; first = false {
		answer, err := ask(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && first:
			return err
		case err != nil:
			_, err = fmt.Fprintln(out, "kproxy doesn't answer:", err)
		default:
			err = show(out, answer)
		}
		if err != nil {
			return err
		}
		if !sleep(ctx, watchEvery) {
			return nil
		}
	}
}

// waitEvery is how often a kproxy that isn't ready is asked again.
const waitEvery = 100 * time.Millisecond

// waitUntilReady asks until kproxy is ready. One that isn't there yet, or doesn't
// answer, is waited for; one that may not be asked isn't.
func waitUntilReady(ctx context.Context, timeout time.Duration, status func(context.Context) (plan.Status, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	why := "it didn't answer in time"
	for {
		st, err := status(ctx)
		switch {
		case err == nil && st.Ready:
			return nil
		case err == nil:
			why = st.NotReady
		case ctx.Err() != nil: // the last answer says more
		case errors.Is(err, web.ErrNotRunning), errors.Is(err, web.ErrNoAnswer):
			why = err.Error()
		default:
			return err
		}
		if !sleep(ctx, waitEvery) {
			return fmt.Errorf("kproxy isn't ready after %v: %s", timeout, why)
		}
	}
}
