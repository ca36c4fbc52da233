package main

import (
	"context"
	"fmt"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/cmd/kproxy/screen/terminal"
	"kproxy.dev/kproxy/lab/lesson"
)

// guide leads through tasks beside a screen: it waits for what the one that is shown told the user
// to do, by looking at what really is, and says when it has come.
type guide struct {
	shell   shell
	tasks   []lesson.Task
	answers chan answer
}

type answer struct {
	step int
	text string
}

// checkEvery is how often a task is looked at, and checkWithin how long that may take.
const (
	checkEvery  = 500 * time.Millisecond
	checkWithin = 30 * time.Second
)

func newGuide(s shell, tasks []lesson.Task) *guide { return &guide{s, tasks, make(chan answer, 1)} }

func (g *guide) views() []screen.Step {
	var out []screen.Step
	for _, t := range g.tasks {
		out = append(out, screen.Step{Title: t.Title, Text: t.Text, Commands: t.Commands, Look: t.Look, Question: t.Blocks["answer"] != ""})
	}
	return out
}

// answer takes in what was typed; the last one before it is looked at counts.
func (g *guide) answer(step int, text string) {
	select {
	case <-g.answers:
	default:
	}
	g.answers <- answer{step, text}
}

// run looks at the task that m shows until ctx ends. Who goes on from one that isn't done has its solution carried out, for the
// tasks that follow.
func (g *guide) run(ctx context.Context, m *screen.Model, s *terminal.Screen) {
	begun, done := map[int]time.Time{}, map[int]bool{}
	was := 0 // the task that was shown
	for {
		var given *answer
		select {
		case <-ctx.Done():
			return
		case a := <-g.answers:
			given = &a
		case <-time.After(checkEvery):
		}
		at, state := 0, screen.StepState{}
		if !s.Do(func() { at, state = m.Guided() }) {
			return
		}
		for ; was < at; was++ {
			if !done[was] {
				_, _ = g.shell.run(ctx, g.tasks[was].Blocks["solution"], time.Now()) // what was never begun needs no end
				done[was] = true
			}
		}
		was = at
		task := &g.tasks[at]
		if len(task.Blocks) == 0 || state.Done {
			continue
		}
		if begun[at].IsZero() {
			begun[at] = time.Now()
			if _, err := g.shell.run(ctx, task.Blocks["setup"], begun[at]); err != nil {
				task.Blocks = nil // there is nothing to look at
				s.Do(func() { m.Guide(at, screen.StepState{Said: fmt.Sprintf("this step can't begin: %v", err)}) })
				continue
			}
		}
		within, cancel := context.WithTimeout(ctx, checkWithin)
		switch question := task.Blocks["answer"]; {
		case question == "":
			said, err := g.shell.run(within, task.Blocks["check"], begun[at])
			state.Done, state.Said = err == nil, said
		case given != nil && given.step == at:
			state.Done, state.Said = g.shell.right(within, question, given.text)
		case state.Said == "":
			state.Said = "your answer: press a"
		}
		cancel()
		done[at] = state.Done
		s.Do(func() { m.Guide(at, state) })
	}
}
