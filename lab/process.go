package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a program in a namespace, such as `kproxy run` on the node. It
// dies with the program that started it, however that ends.
type Process struct {
	Namespace *Namespace
	Path      string
	Args      []string  // without the program's name
	Env       []string  // added to this process's environment
	Output    io.Writer // receives stdout and stderr as well; may be nil

	log tail

	mu  sync.Mutex // guards run: one program at a time
	run *run
}

// run is one life of a program.
type run struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended
	err    error         // how it ended; set before exited is closed
}

// Start starts the program. A Process may be started again when it has ended;
// its log goes on.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return fmt.Errorf("start %s: already running as %d", p.Path, p.run.cmd.Process.Pid)
	}
	cmd := exec.Command(p.Path, p.Args...)
	cmd.Env = append(os.Environ(), p.Env...)
	cmd.Stdout = &p.log
	if p.Output != nil {
		cmd.Stdout = io.MultiWriter(&p.log, p.Output)
	}
	cmd.Stderr = cmd.Stdout
	// Its own group: Ctrl-C in the terminal is for the lab, which then stops it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	r := &run{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		err := p.Namespace.Do(func() error {
			err := cmd.Start()
			started <- err
			if err != nil {
				return nil
			}
			// PR_SET_PDEATHSIG fires when the thread that forked ends, not the
			// process (prctl(2), golang/go#27505): stay until the child has ended.
			r.err = cmd.Wait()
			close(r.exited)
			return nil
		})
		if err != nil {
			started <- err
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.Path, err)
	}
	p.run = r
	return nil
}

// running is called with mu held.
func (p *Process) running() bool {
	if p.run == nil {
		return false
	}
	select {
	case <-p.run.exited:
		return false
	default:
		return true
	}
}

// Running reports whether the program runs.
func (p *Process) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running()
}

// PID is the process id, or 0 before the first Start.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run == nil {
		return 0
	}
	return p.run.cmd.Process.Pid
}

// Signal sends a signal; a program that has ended is no error.
func (p *Process) Signal(s os.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return nil
	}
	if s == syscall.SIGKILL { // also those that it started, which would go on
		_ = syscall.Kill(-p.run.cmd.Process.Pid, syscall.SIGKILL)
	}
	if err := p.run.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.Path, err)
	}
	return nil
}

// Wait waits until the program has ended and returns how: nil for exit status
// 0, else an [*exec.ExitError].
func (p *Process) Wait(ctx context.Context) error {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	if r == nil {
		return nil
	}
	select {
	case <-r.exited:
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stop sends SIGTERM, and SIGKILL after the given time. The error says if the
// program had to be killed or didn't exit with status 0.
func (p *Process) Stop(within time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	err := p.Wait(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.Join(fmt.Errorf("stop %s: still running %s after SIGTERM", p.Path, within), p.Kill())
	}
	return err
}

// Kill sends SIGKILL and waits for the end.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	var exit *exec.ExitError
	if err := p.Wait(context.Background()); err != nil && !errors.As(err, &exit) {
		return err
	}
	return nil
}

// WaitReady calls ready every 20 ms until it returns nil. It gives up when ctx
// ends or the program does; the error then ends with the log.
func (p *Process) WaitReady(ctx context.Context, ready func() error) error {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	if r == nil {
		return fmt.Errorf("wait for %s: it was never started", p.Path)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-r.exited:
			return fmt.Errorf("wait for %s: it ended (%v):\n%s", p.Path, r.err, p.Log())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w:\n%s", p.Path, ctx.Err(), err, p.Log())
		}
	}
}

// Log returns what the program has printed, the last [LogLimit] bytes of it.
func (p *Process) Log() string { return p.log.String() }

// LogLimit bounds what a Process keeps of its program's output.
const LogLimit = 4 << 20

// tail keeps the end of what is written to it. The zero value is ready.
type tail struct {
	mu  sync.Mutex // a program writes while others read
	buf []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - LogLimit; over > LogLimit/4 { // not at every write
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf[max(0, len(t.buf)-LogLimit):])
}
