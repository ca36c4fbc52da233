package main

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/userspace"
	"kproxy.dev/kproxy/userspace/handover"
)

// With --supervise, kproxy runs itself again, as the worker, and waits for its end. The worker's keeper has its
// descriptors (package handover). If the worker ends without having said that it does, another one is started at
// once, which goes on with its connections.
//
// The two have a pair of sockets: the worker says a few words there, which are read when it has ended, and the
// keeper answers the process that has the other end.

// Environment of the worker.
const (
	envSocket = "KPROXY_SUPERVISOR" // descriptor of its socket
	envLeft   = "KPROXY_LEFT"       // what the worker before has left: the socket's descriptor, its keeper, the number of its records
	envPause  = "KPROXY_PAUSE"      // before it serves
)

// What the worker says, each with a number that isn't 0.
const (
	saysKeeper = "keeper" // its process
	saysMemory = "memory" // the records' descriptor; unsaid if nothing of it goes on
	saysEnd    = "end"    // 1
)

// The next worker goes on at once. After crashesInARow, each within soonAfter the start, it begins anew, as it may be the
// connections that it fails at, and waits before it serves, for twice as long each time.
const (
	soonAfter     = 10 * time.Second
	crashesInARow = 3
	pauseMin      = time.Second
	pauseMax      = 30 * time.Second
)

// supervise runs workers until one ends in good order, and ends as that does.
func supervise(log *slog.Logger) error {
	runtime.LockOSThread() // a keeper ends with the thread that started its worker (PR_SET_PDEATHSIG of prctl(2))
	signals := make(chan os.Signal, 2)
	signal.Reset(syscall.SIGTERM, syscall.SIGINT) // what they do is the worker's to decide
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	left, pause := &worker{}, time.Duration(0)
	for crashes := 0; ; {
		began := time.Now()
		w, err := startWorker(left, pause)
		if err != nil {
			return fmt.Errorf("start a worker: %w", err)
		}
		state := w.wait(signals)
		left.release()
		if w.said[saysEnd] != 0 || w.stopping {
			w.release()
			os.Exit(max(state.ExitCode(), 0))
		}
		if time.Since(began) > soonAfter+pause {
			crashes, pause = 0, 0
		}
		left = w
		if crashes++; crashes > crashesInARow {
			pause = min(max(2*pause, pauseMin), pauseMax)
			delete(left.said, saysMemory)
		}
		if left.said[saysMemory] == 0 {
			left.release() // copies of what isn't its own, as it hasn't taken over yet, stay open no longer
		}
		log.Error("kproxy crashed; starting it again", "end", state.String(), "connections go on", left.said[saysMemory] != 0, "pause", pause)
	}
}

// worker is a process that works, or has.
type worker struct {
	cmd      *exec.Cmd
	socket   *os.File
	stopping bool           // it was told to end
	said     map[string]int // once it has ended
}

func startWorker(left *worker, pause time.Duration) (*worker, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	w := &worker{socket: os.NewFile(uintptr(pair[0]), "worker"), said: map[string]int{}}
	theirs := os.NewFile(uintptr(pair[1]), "supervisor")
	defer theirs.Close()
	w.cmd = exec.Command("/proc/self/exe", os.Args[1:]...) // also when another version has been installed
	w.cmd.Args[0] = os.Args[0]
	w.cmd.Stdin, w.cmd.Stdout, w.cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	w.cmd.ExtraFiles = []*os.File{theirs}
	w.cmd.Env = append(os.Environ(), envSocket+"=3", fmt.Sprintf("%s=%s", envPause, pause))
	if memory := left.said[saysMemory]; memory != 0 {
		w.cmd.ExtraFiles = append(w.cmd.ExtraFiles, left.socket)
		w.cmd.Env = append(w.cmd.Env, fmt.Sprintf("%s=4 %d %d", envLeft, left.said[saysKeeper], memory))
	}
	if err := w.cmd.Start(); err != nil {
		w.socket.Close()
		return nil, err
	}
	return w, nil
}

// wait passes signals on until the worker ends, and then notes what it has said.
func (w *worker) wait(signals <-chan os.Signal) *os.ProcessState {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_ = w.cmd.Wait() // its state says more
	}()
	for {
		select {
		case s := <-signals:
			w.stopping = w.stopping || s != syscall.SIGHUP
			if s != syscall.SIGINT { // which a terminal sends to both
				_ = w.cmd.Process.Signal(s) // it may have ended
			}
		case <-gone:
			w.hear()
			return w.cmd.ProcessState
		}
	}
}

func (w *worker) hear() {
	for line := make([]byte, 64); ; {
		n, _, err := unix.Recvfrom(int(w.socket.Fd()), line, unix.MSG_DONTWAIT)
		if err != nil || n == 0 {
			return
		}
		word, number, _ := strings.Cut(string(line[:n]), " ")
		w.said[word], _ = strconv.Atoi(number)
	}
}

// release ends the keeper: descriptors that weren't taken are closed.
func (w *worker) release() {
	if keeper := w.said[saysKeeper]; keeper != 0 {
		_ = unix.Kill(keeper, unix.SIGKILL) // a child of this process, which only this call waits for
		for {
			if _, err := unix.Wait4(keeper, nil, 0, nil); err != unix.EINTR {
				break
			}
		}
	}
	if w.socket != nil {
		w.socket.Close()
	}
	w.socket = nil
	clear(w.said)
}

// supervisorMetadata names the *supervised among a program's metadata; there is none where it isn't a worker.
const supervisorMetadata = "supervisor"

// supervised is a worker's way to its supervisor.
type supervised struct {
	socket int
	left   handover.Kept // of the worker before, which crashed
	memory int           // descriptor of the records there; 0 if there is nothing to go on with
	pause  time.Duration
}

// underSupervisor starts the keeper, where this is a worker; else it returns nil. It comes before all else: what is
// opened from then on is kept, and memory is still little.
func underSupervisor() (*supervised, error) {
	socket, err := strconv.Atoi(os.Getenv(envSocket))
	if err != nil {
		return nil, nil
	}
	s := &supervised{socket: socket}
	_, _ = fmt.Sscan(os.Getenv(envLeft), &s.left.Socket, &s.left.Keeper, &s.memory)
	s.pause, _ = time.ParseDuration(os.Getenv(envPause))
	for _, fd := range []int{s.socket, s.left.Socket} {
		if fd != 0 {
			unix.CloseOnExec(fd)
		}
	}
	for _, name := range []string{envSocket, envLeft, envPause} {
		os.Unsetenv(name) // the programs that it runs have no supervisor
	}
	pid, err := handover.StartKeeper(socket)
	if err != nil {
		return nil, err
	}
	return s, s.say(saysKeeper, pid)
}

func (s *supervised) say(word string, number int) error {
	return unix.Sendto(s.socket, fmt.Appendf(nil, "%s %d", word, number), unix.MSG_NOSIGNAL, nil)
}

// end says that the process is about to end in good order.
func (s *supervised) end() {
	if s != nil {
		_ = s.say(saysEnd, 1) // the supervisor may have been killed
	}
}

// recover takes what the worker before has left, as the first thing of all: that had every port and lock.
func (s *supervised) recover(o *agent.Options) {
	if s == nil {
		return
	}
	o.Recorded, o.Pause = func(memory int) { _ = s.say(saysMemory, memory) }, s.pause
	if s.memory == 0 {
		return
	}
	var err error
	if o.Remains, err = userspace.Salvage(&s.left, s.memory); err != nil {
		o.Log.Error("connections of the kproxy that crashed are lost", "error", err)
	}
	s.left.Release()
	unix.Close(s.left.Socket)
}
