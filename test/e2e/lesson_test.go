package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kproxy.dev/kproxy/lab/lesson"
	"kproxy.dev/kproxy/plan"
)

// lessonAnswers are the right answers to questions, by lesson and task, as this lab must have them.
var lessonAnswers = map[string]string{
	"1 Look for the address":          "0",
	"1 Who answers then?":             "10.2.0.4",
	"1 At the node's own address":     "30080",
	"2 A proxy that is a program":     "userspace",
	"2 How the connection gets there": "10244",
	"3 Find the rules":                "3",
	"3 Only first packets":            "10.2.0.3",
	"3 UDP has no end":                "120",
	"4 What the kernel must have":     "nftables",
	"4 Read a virtual server":         "rr",
	"4 The addresses are on a link":   "1",
	"5 Find the element":              "pick-3",
	"5 Choose an endpoint":            "10.2.0.4",
	"6 Fault 1: find it":              "guard",
	"6 Fault 2: find it":              "5",
	"6 Fault 3: find it":              "net.ipv4.ip_forward",
	"6 Fault 4: find it":              "7777",
	"6 Fault 5: find it":              "early",
	"6 Fault 6: find it":              "0",
	"7 What kproxy knows":             "4",
	"7 The rule that tells":           "10249",
}

var taskNumber = regexp.MustCompile(`(?m)^try in another terminal: (\d+) of (\d+) `)

// TestLabLessons goes through every lesson on a terminal of 80 columns and 24 lines: a question takes
// no wrong answer, a task isn't done before it is done, and then each is.
func TestLabLessons(t *testing.T) {
	t.Parallel()
	lessons, err := lesson.All()
	if err != nil || len(lessons) != 7 {
		t.Fatalf("%d lessons, %v", len(lessons), err)
	}
	asked := map[string]bool{}
	for i, ls := range lessons {
		t.Run(strconv.Itoa(i+1), func(t *testing.T) {
			asked[strconv.Itoa(i+1)] = true
			l := newTourLab(t, plan.ModeAuto, plan.None)
			command := fmt.Sprintf("TERM=xterm LC_ALL=C.UTF-8 NO_COLOR=1 exec %s lab lesson %d --slow %d", absolute(t, binary), i+1, int(slow))
			l.screen = startTTY(t, l.waits, 80, 24, l.inside(command))
			t.Cleanup(func() { l.screen.cmd.Process.Signal(syscall.SIGTERM) })
			l.shows("the client's last second: [1-9]")
			l.shows(`clients (?s:.*)10\.2\.0\.4:9000`)
			done := 0
			for at, of := 1, 1; at <= of; at++ {
				l.shows(fmt.Sprintf("(?m)^try in another terminal: %d of ", at))
				screen := strings.Join(l.screen.screen(), "\n")
				of, _ = strconv.Atoi(taskNumber.FindStringSubmatch(screen)[2])
				task := taskOn(screen, ls.Tasks)
				if task == nil {
					t.Fatalf("no task of the lesson is on the screen:\n%s", screen)
				}
				l.shows("(?m)^waiting: ")
				name := fmt.Sprintf("%d %s", i+1, task.Title)
				if task.Blocks["answer"] != "" {
					asked[name] = true
					l.shows("your answer")
					l.answers("elsewhere", lessonAnswers[name])
				} else {
					do := task.Blocks["solution"]
					if do == "" {
						do = strings.Join(task.Commands, "\n")
					}
					l.sh("export PATH=/run/kproxy-lab/bin:$PATH\n" + do)
				}
				l.shows("✓ confirmed: ")
				done++
				l.screen.press("n")
			}
			if done < 2 {
				t.Errorf("the lesson has %d tasks here", done)
			}
			l.screen.press("q")
			l.screen.left("q")
			l.nothingLeft()
		})
	}
	for name := range lessonAnswers {
		if asked[name[:1]] && !asked[name] && !strings.HasPrefix(name, "4 What") && !t.Failed() { // IPVS may be here
			t.Errorf("no lesson has asked %q", name)
		}
	}
}

// TestSkippedFaultIsMended: who goes on from a fault without mending it has only the next one to find.
func TestSkippedFaultIsMended(t *testing.T) {
	t.Parallel()
	l := newTourLab(t, plan.ModeAuto, plan.None)
	command := fmt.Sprintf("TERM=xterm LC_ALL=C.UTF-8 NO_COLOR=1 exec %s lab lesson 6 --slow %d", absolute(t, binary), int(slow))
	l.screen = startTTY(t, l.waits, 80, 24, l.inside(command))
	t.Cleanup(func() { l.screen.cmd.Process.Signal(syscall.SIGTERM) })
	l.shows("Fault 1: find it")
	planted := func() bool {
		return strings.Contains(l.try("export PATH=/run/kproxy-lab/bin:$PATH\nnode nft list ruleset"), "table ip guard")
	}
	l.eventually("the fault", func() error {
		if !planted() {
			return errors.New("it isn't planted")
		}
		return nil
	})
	l.screen.press("n")
	l.shows("Fault 1: mend it(?s:.*)waiting: the fault is still there")
	l.screen.press("n")
	l.shows("Fault 2: find it")
	l.eventually("the fault to be gone", func() error {
		if planted() {
			return errors.New("it is still there")
		}
		return nil
	})
	l.screen.press("q")
	l.screen.left("q")
	l.nothingLeft()
}

// taskOn is the task whose title is on the screen.
func taskOn(screen string, tasks []lesson.Task) *lesson.Task {
	for i := range tasks {
		if regexp.MustCompile(`(?m)^Lesson \d, .*: ` + regexp.QuoteMeta(tasks[i].Title) + "$").MatchString(screen) {
			return &tasks[i]
		}
	}
	return nil
}
