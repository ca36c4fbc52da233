package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/view"
	"kproxy.dev/kproxy/view/terminal"
	"kproxy.dev/kproxy/web"
)

// watchEvery is how often a watched kproxy is asked.
const watchEvery = time.Second

// statusFunc asks for what is watched.
type statusFunc func(context.Context) (plan.Status, error)

// canDraw reports whether out is this process's terminal, and one to draw on.
func canDraw(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && terminal.Usable(os.Stdin, f, os.Getenv("TERM"))
}

// screen watches a kproxy on the terminal until the user leaves.
type screen struct {
	model  *view.Model
	client *web.Client
	status statusFunc
	// note is asked for the model's note with every status; nil for none.
	note func() string
	// warm is a status to begin with; nil for none.
	warm *plan.Status
}

func (s *screen) run(ctx context.Context, out *os.File) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.warm != nil {
		s.model.Update(*s.warm, time.Now())
	}
	updates := make(chan func())
	var g errgroup.Group
	g.Go(func() error { s.poll(ctx, updates); return nil })
	g.Go(func() error { s.follow(ctx, updates); return nil })
	t := terminal.Screen{
		In: os.Stdin, Out: out, Updates: updates,
		Draw: func(w, h int) []string { return s.model.Render(time.Now(), w, h) },
		Key:  func(k view.Key) bool { return s.model.Key(k, time.Now()) },
	}
	err := t.Run(ctx)
	cancel()
	return errors.Join(err, g.Wait())
}

// poll asks for the status every second, whether or not kproxy is there.
func (s *screen) poll(ctx context.Context, updates chan<- func()) {
	for {
		st, err := s.status(ctx)
		note := ""
		if s.note != nil {
			note = s.note()
		}
		apply(ctx, updates, func() {
			s.model.SetNote(note)
			if err != nil {
				s.model.Fail(err, time.Now())
			} else {
				s.model.Update(st, time.Now())
			}
		})
		if !sleep(ctx, watchEvery) {
			return
		}
	}
}

// follow passes on events; after a restart of kproxy, its events.
func (s *screen) follow(ctx context.Context, updates chan<- func()) {
	for {
		// Why it ended is what poll finds out as well, and shows.
		_ = s.client.Events(ctx, func(e plan.Event) {
			apply(ctx, updates, func() { s.model.Event(e) })
		})
		if !sleep(ctx, watchEvery) {
			return
		}
	}
}

func apply(ctx context.Context, updates chan<- func(), f func()) {
	select {
	case updates <- f:
	case <-ctx.Done():
	}
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
