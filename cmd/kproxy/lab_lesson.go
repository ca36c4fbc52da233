package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/lesson"
	"kproxy.dev/kproxy/plan"
)

// labBin holds what a lesson tells the learner to run.
const labBin = labDir + "/bin"

func labLessonCommand() *cli.Command {
	return &cli.Command{
		Name: "lesson", Usage: "learn how a service proxy works, by tasks that are checked on real packets; without a number, lists the lessons",
		ArgsUsage: "[NUMBER]",
		Flags: []cli.Flag{
			slowFlag(),
			&cli.BoolFlag{Name: "solutions", Usage: "print the lesson with the solution of each task, for teachers, and end"},
		},
		Action: func(c *cli.Context) error { return hostError(labLesson(c)) },
	}
}

func labLesson(c *cli.Context) error {
	lessons, err := lesson.All()
	if err = errors.Join(err, checkLabFlags(c)); err != nil {
		return err
	}
	if c.NArg() == 0 {
		for i, l := range lessons {
			fmt.Fprintf(c.App.Writer, "%d  %-28s %2d tasks, mode %s\n", i+1, l.Title, len(l.Tasks), l.Mode)
		}
		_, err := fmt.Fprintln(c.App.Writer, "\nsudo kproxy lab lesson 1 begins the first. A quarter of an hour each; a second terminal is needed.")
		return err
	}
	n, err := strconv.Atoi(c.Args().First())
	switch {
	case err != nil || n < 1 || n > len(lessons) || c.NArg() > 1:
		return usageError("kproxy lab lesson takes a number from 1 to %d, got %q", len(lessons), c.Args().Slice())
	case c.Bool("solutions"):
		_, err := fmt.Fprint(c.App.Writer, solutions(&lessons[n-1]))
		return err
	case !canDraw(c.App.Writer):
		return errors.New("a lesson needs a terminal; --solutions prints it")
	}
	return runLesson(c, n, &lessons[n-1])
}

// solutions is a lesson as text for its teacher.
func solutions(l *lesson.Lesson) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (mode %s)\n", l.Title, l.Mode)
	for i := range l.Tasks {
		t := &l.Tasks[i]
		fmt.Fprintf(&b, "\n%d. %s\n", i+1, t.Title)
		for _, p := range t.Text {
			fmt.Fprintf(&b, "   %s\n", strings.Join(screen.Wrap(p, 76, 100), "\n   "))
		}
		for _, command := range t.Commands {
			fmt.Fprintf(&b, "     $ %s\n", command)
		}
		for _, kind := range []string{"setup", "solution", "answer", "check"} {
			if block := t.Blocks[kind]; block != "" {
				fmt.Fprintf(&b, "   %s:\n     %s\n", kind, strings.ReplaceAll(block, "\n", "\n     "))
			}
		}
	}
	return b.String()
}

// runLesson starts the lesson's lab and leads through the tasks that make sense in it.
func runLesson(c *cli.Context, number int, l *lesson.Lesson) (err error) {
	cfg := labConfig(3)
	cfg.IPv6 = false // half of what there is to read
	mode := l.Mode
	s, err := startLab(c.Context, mode, cfg, paceOf(c))
	var lacks *exitError
	missing := ""
	if errors.As(err, &lacks) && lacks.status == exitHost && needRoot() == nil {
		mode = string(plan.ModeUserspace) // the tasks for it say what is missing
		if s, err = startLab(c.Context, mode, cfg, paceOf(c)); err == nil {
			missing = fmt.Sprintf("; mode %s, as %v", mode, lacks)
		}
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	ctx, cancel := context.WithCancel(c.Context)
	defer cancel()
	st, err := s.client.Status(ctx)
	if err != nil {
		return err
	}
	if _, err := s.writeTour(st); err != nil {
		return fmt.Errorf("write what the lesson tells to run: %w", err)
	}
	sh := shell{mode}
	tasks := slices.DeleteFunc(l.Tasks, func(t lesson.Task) bool { // which make no sense in this lab
		_, err := sh.run(ctx, t.Blocks["when"], time.Now())
		return err != nil
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if len(tasks) == 0 {
		if lacks == nil {
			lacks = &exitError{exitHost, errors.New("this lesson needs the program nft: install Debian's package nftables")}
		}
		return lacks
	}
	tasks[0].Commands = slices.Concat([]string{"export PATH=" + labBin + ":$PATH"}, tasks[0].Commands)
	for i := range tasks {
		tasks[i].Title = fmt.Sprintf("Lesson %d, %s: %s", number, l.Title, tasks[i].Title)
	}
	var traffic recentTraffic
	if err := traffic.start(ctx, s, 20); err != nil {
		return err
	}
	note := func() string { return "the client's last second: " + traffic.second() + missing }
	return watchStatus(ctx, s.client, screen.Config{Theme: screen.ThemeOf(os.Getenv), Lesson: "default/web:line/TCP", Note: note}, st, s.client.Status, newGuide(sh, tasks))
}

// binScript runs the kproxy that made the lab; commands that ask a running one ask the lab's.
const binScript = `#!/bin/sh
case "$1" in
status|ready|describe|connections|events|pin|drain|trace|bugreport) exec %[1]s "$@" --socket %[2]s ;;
esac
exec %[1]s "$@"
`

// writeBin writes the commands of a lesson: kproxy, ask, and one for each machine, which runs what
// follows there.
func (s *labSession) writeBin() error {
	err := os.Mkdir(labBin, 0o755)
	write := func(name, script string) {
		err = errors.Join(err, os.WriteFile(filepath.Join(labBin, name), []byte(script), 0o755))
	}
	write("kproxy", fmt.Sprintf(binScript, quote(s.proxy.Path), labSocket))
	write("ask", "#!/bin/sh\nexec "+labAsk+" \"$@\"\n")
	machines := []string{s.net.Node.Name, s.net.Client.Name}
	for _, b := range s.net.Backends {
		machines = append(machines, b.Namespace.Name)
	}
	for _, name := range machines {
		write(strings.TrimPrefix(name, lab.DefaultPrefix+"-"), "#!/bin/sh\nexec ip netns exec "+name+" \"$@\"\n")
	}
	return err
}

// shell runs a lesson's blocks, as the learner's shell would.
type shell struct{ mode string }

// run returns what a block prints to its standard output, without spaces around. An empty one does nothing.
func (s shell) run(ctx context.Context, block string, since time.Time) (string, error) {
	if block == "" {
		return "", nil
	}
	cmd := exec.CommandContext(ctx, "bash", "-c", block)
	cmd.WaitDelay = time.Second // for what it has left running
	cmd.Env = append(os.Environ(), "PATH="+labBin+":"+os.Getenv("PATH"), "MODE="+s.mode, fmt.Sprintf("SINCE=%.3f", float64(since.UnixMilli())/1000))
	out, err := cmd.Output()
	if failed, ok := errors.AsType[*exec.ExitError](err); ok && len(failed.Stderr) > 0 {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
	}
	return strings.TrimSpace(string(out)), err
}

// right compares an answer with those that a block finds in the lab.
func (s shell) right(ctx context.Context, block, answer string) (bool, string) {
	found, _ := s.run(ctx, block, time.Now()) // grep -c that counts none fails
	switch {
	case found == "":
		return false, "the lab itself has no answer now: is it as the task before left it?"
	case slices.ContainsFunc(strings.Split(found, "\n"), func(a string) bool { return strings.EqualFold(strings.TrimSpace(a), answer) }):
		return true, answer + " it is"
	}
	return false, fmt.Sprintf("%q isn't it", answer)
}
