package programming

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
)

// proxy is a running subject.
type proxy struct {
	subject
	process *lab.Process
	log     *logWatch
	dir     string // of its socket and state
}

func (p *proxy) socket() string { return filepath.Join(p.dir, "kproxy.sock") }

// processorTime holds the seconds that the process, and the children that it has waited
// for, have used. Its own are exact; those of children, such as iptables-restore, are in
// hundredths (proc_pid_stat(5)).
type processorTime struct{ own, children float64 }

func (p *proxy) cpuTime() (t processorTime, err error) {
	pid := p.process.PID()
	if t.own, err = load.ProcessTime(pid); err != nil {
		return t, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return t, fmt.Errorf("read processor time of children: %w", err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return t, fmt.Errorf("read processor time of children: %q", text)
	}
	for _, f := range fields[13:15] { // cutime, cstime
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return t, fmt.Errorf("read processor time of children: %w", err)
		}
		t.children += n / 100
	}
	return t, nil
}

// cpu is both together.
func (p *proxy) cpu() (float64, error) {
	t, err := p.cpuTime()
	return t.own + t.children, err
}

// memory returns fields of the process's status and smaps_rollup, in MiB: VmRSS,
// VmHWM, Pss.
func (p *proxy) memory() (map[string]float64, error) {
	out := map[string]float64{}
	for _, file := range []string{"status", "smaps_rollup"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.process.PID(), file))
		if err != nil {
			return nil, fmt.Errorf("read memory: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(line, ":")
			if kB, ok := strings.CutSuffix(strings.TrimSpace(value), " kB"); ok {
				n, err := strconv.ParseFloat(kB, 64)
				if err != nil {
					return nil, fmt.Errorf("read memory: %w", err)
				}
				out[name] = n / 1024
			}
		}
	}
	return out, nil
}

// logWatch is a program's output. It notes when lines with a mark come.
type logWatch struct {
	mark []byte

	mu    sync.Mutex // the program writes, cases read
	rest  []byte     // of a line that isn't complete
	marks []time.Time
}

func (w *logWatch) Write(b []byte) (int, error) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, b...)
	for {
		line, rest, whole := bytes.Cut(w.rest, []byte("\n"))
		if !whole {
			break
		}
		// kube-proxy syncs each family on its own; services are of IPv4 only.
		if bytes.Contains(line, w.mark) && !bytes.Contains(line, []byte(`ipFamily="IPv6"`)) {
			w.marks = append(w.marks, now)
		}
		w.rest = rest
	}
	return len(b), nil
}

// after returns the first mark after t.
func (w *logWatch) after(t time.Time) (time.Time, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.marks {
		if m.After(t) {
			return m, true
		}
	}
	return time.Time{}, false
}

// await waits for a mark after t.
func (w *logWatch) await(ctx context.Context, p *lab.Process, t time.Time) (time.Time, error) {
	for {
		if m, ok := w.after(t); ok {
			return m, nil
		}
		if !p.Running() {
			return time.Time{}, fmt.Errorf("it ended: %s", end(p.Log()))
		}
		if err := lab.Sleep(ctx, time.Millisecond); err != nil {
			return time.Time{}, errors.Join(fmt.Errorf("wait for %q in the log: %w", w.mark, err), errors.New(end(p.Log())))
		}
	}
}

// end is the last of a log.
func end(s string) string { return s[max(0, len(s)-1500):] }
