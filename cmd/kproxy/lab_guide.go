package main

import (
	"context"
	"fmt"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/cmd/kproxy/screen/terminal"
)

// guide leads through steps beside a screen: it waits for what the step that is shown told the user
// to do, by looking at what really is, and says when it has come.
type guide struct {
	steps   []guideStep
	answers chan answer
}

// guideStep is a step and what decides that it is done.
type guideStep struct {
	screen.Step
	// setup is run when the step is first shown; nil for nothing.
	setup func(context.Context) error
	// skipped is run when the user goes on from the step, which isn't done; nil for nothing. It does what
	// the user was to do, for the steps that follow.
	skipped func(context.Context) error
	// check looks whether the step is done, and says what it saw or what is missing. since is when
	// the step was first shown, answer what was typed if the step is a question. A step without a
	// check can't be seen from outside.
	check func(ctx context.Context, since time.Time, answer string) (done bool, said string)
}

type answer struct {
	step int
	text string
}

// checkEvery is how often a step is looked at, and checkWithin how long that may take.
const (
	checkEvery  = 500 * time.Millisecond
	checkWithin = 30 * time.Second
)

func newGuide(steps []guideStep) *guide { return &guide{steps, make(chan answer, 1)} }

func (g *guide) views() []screen.Step {
	var out []screen.Step
	for _, s := range g.steps {
		out = append(out, s.Step)
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

// run looks at the step that m shows until ctx ends.
func (g *guide) run(ctx context.Context, m *screen.Model, s *terminal.Screen) {
	begun, done := map[int]time.Time{}, map[int]bool{}
	was := 0 // the step that was shown
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
			if left := &g.steps[was]; left.skipped != nil && !done[was] {
				_ = left.skipped(ctx) // what was never begun needs no end
				done[was] = true
			}
		}
		was = at
		step := &g.steps[at]
		if step.check == nil || state.Done {
			continue
		}
		if begun[at].IsZero() {
			begun[at] = time.Now()
			if step.setup != nil {
				if err := step.setup(ctx); err != nil {
					step.check = nil
					s.Do(func() { m.Guide(at, screen.StepState{Said: fmt.Sprintf("this step can't begin: %v", err)}) })
					continue
				}
			}
		}
		within, cancel := context.WithTimeout(ctx, checkWithin)
		switch {
		case !step.Question:
			state.Done, state.Said = step.check(within, begun[at], "")
		case given != nil && given.step == at:
			state.Done, state.Said = step.check(within, begun[at], given.text)
		case state.Said == "":
			state.Said = "your answer: press a"
		}
		cancel()
		done[at] = state.Done
		s.Do(func() { m.Guide(at, state) })
	}
}
