package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
)

// machineTimes are hundredths of seconds since boot, of all processors.
type machineTimes struct{ busy, idle, steal float64 }

// readMachine reads the first line of /proc/stat (proc_stat(5)).
func readMachine() (m machineTimes, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return m, fmt.Errorf("read the machine's processor time: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, f := range strings.Fields(line) {
		n, err := strconv.ParseFloat(f, 64)
		switch {
		case i == 0:
		case err != nil:
			return m, fmt.Errorf("read the machine's processor time: %w", err)
		case i == 4 || i == 5:
			m.idle += n
		case i == 8:
			m.steal += n
		case i < 8:
			m.busy += n
		}
	}
	return m, nil
}

// use is what the processors did between two looks, and for whom.
type use struct {
	machine machineTimes
	own     float64 // seconds: of this program and all that it has started
}

// readUse adds up this process, its children that have ended, with theirs, and
// the given ones that run.
func readUse(running ...*lab.Process) (u use, err error) {
	if u.machine, err = readMachine(); err != nil {
		return u, err
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			return u, fmt.Errorf("read own processor time: %w", err)
		}
		u.own += time.Duration(r.Utime.Nano() + r.Stime.Nano()).Seconds()
	}
	for _, p := range running {
		t, err := load.ProcessTime(p.PID())
		if err != nil {
			return u, err
		}
		u.own += t
	}
	return u, nil
}

// since are the shares of the processors' time that the hypervisor took, and
// others on this machine, the kernel's own threads among them.
func (u use) since(was use) (steal, others float64) {
	busy, stolen := u.machine.busy-was.machine.busy, u.machine.steal-was.machine.steal
	all := busy + stolen + u.machine.idle - was.machine.idle
	if all <= 0 {
		return 0, 0
	}
	return stolen / all, max(0, busy-100*(u.own-was.own)) / all
}

// idleMachine waits until the machine has little to do, but not for others who
// keep it busy: they are reported.
func idleMachine(ctx context.Context) error {
	const look, enough, most = 250 * time.Millisecond, 0.9, 20
	was, err := readMachine()
	for range most {
		if err != nil {
			return err
		}
		if err := pause(ctx, look); err != nil {
			return err
		}
		var now machineTimes
		now, err = readMachine()
		if idle, all := now.idle-was.idle, now.idle-was.idle+now.busy-was.busy+now.steal-was.steal; idle >= enough*all {
			return err
		}
		was = now
	}
	return err
}
