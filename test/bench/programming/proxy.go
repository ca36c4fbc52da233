package programming

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/procfs"

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
	if t.own, err = load.ProcessTime(p.process.PID()); err != nil {
		return t, err
	}
	of, err := procfs.NewProc(p.process.PID())
	if err != nil {
		return t, err
	}
	stat, err := of.Stat()
	t.children = float64(stat.CUTime+stat.CSTime) / 100
	return t, err
}

// cpu is both together.
func (p *proxy) cpu() (float64, error) {
	t, err := p.cpuTime()
	return t.own + t.children, err
}

// memory returns the process's RSS, the highest one since its start, and its PSS, in MiB.
func (p *proxy) memory() (rss, peak, pss float64, err error) {
	of, err := procfs.NewProc(p.process.PID())
	if err != nil {
		return 0, 0, 0, err
	}
	status, err := of.NewStatus()
	shared, err2 := of.ProcSMapsRollup()
	const mib = 1 << 20
	return float64(status.VmRSS) / mib, float64(status.VmHWM) / mib, float64(shared.Pss) / mib, errors.Join(err, err2)
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
