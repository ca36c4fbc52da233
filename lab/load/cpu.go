package load

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
)

// CPU says what the processors did while a load ran, in seconds of one processor.
//
// The kernel forwards a packet on the time of the process that sends it: mostly in
// its system call (the end of veth_xmit raises the softirq, and local_bh_enable
// runs it), and under load in ksoftirqd. So the time of a data plane in the kernel
// is part of Client, Backend and Softirqd, and only the difference of the total
// to that of a run without a data plane shows it.
type CPU struct {
	Client   float64 `json:"client"`   // the load's process
	Backend  float64 `json:"backend"`  // the servers' processes
	Proxy    float64 `json:"proxy"`    // the proxy's process, or processes
	Softirqd float64 `json:"softirqd"` // the kernel's threads for softirqs, and all softirqs where [InterruptsApart]
	Machine  float64 `json:"machine"`  // all processors that weren't idle; what exceeds Total is other programs' work
	Steal    float64 `json:"steal"`    // taken by the hypervisor
	Idle     float64 `json:"idle"`
}

// Total returns what the load cost: client, server, proxy, and the kernel's part.
func (c CPU) Total() float64 { return c.Client + c.Backend + c.Proxy + c.Softirqd }

// Others returns what the machine did besides. Sampling may make that negative; it returns 0 then.
func (c CPU) Others() float64 { return max(0, c.Machine-c.Total()) }

func (c CPU) minus(b CPU) CPU {
	return CPU{
		c.Client - b.Client, c.Backend - b.Backend, c.Proxy - b.Proxy, c.Softirqd - b.Softirqd,
		c.Machine - b.Machine, c.Steal - b.Steal, c.Idle - b.Idle,
	}
}

// cpuReader reads what the processors have done so far.
type cpuReader struct {
	servers, proxies, softirqd []int
	apart                      bool
	last                       map[int]float64 // by process: one that has ended counts as when it was read last
}

func newCPUReader(servers, proxies []int) *cpuReader {
	return &cpuReader{servers, proxies, kernelThreads("ksoftirqd/"), InterruptsApart(), map[int]float64{}}
}

// kernelThreads finds those with a prefix of their names; none in a PID namespace.
func kernelThreads(prefix string) (out []int) {
	all, _ := procfs.AllProcs() // none where it can't be read
	for _, p := range all {
		if comm, err := p.Comm(); err == nil && strings.HasPrefix(comm, prefix) {
			out = append(out, p.PID)
		}
	}
	return out
}

// read reads it; the calling process is the client. Only differences mean something.
func (r *cpuReader) read() (CPU, error) {
	c, err := ReadMachine()
	if err != nil {
		return c, err
	}
	if !r.apart {
		c.Softirqd = 0
	}
	if c.Client, err = ProcessTime(os.Getpid()); err != nil {
		return c, err
	}
	for _, part := range []struct {
		into *float64
		pids []int
	}{{&c.Backend, r.servers}, {&c.Proxy, r.proxies}, {&c.Softirqd, r.softirqd}} {
		for _, pid := range part.pids {
			switch t, err := ProcessTime(pid); {
			case err == nil:
				r.last[pid] = t
			case !errors.Is(err, unix.EINVAL): // which is one that has ended, as a proxy's children do
				return c, err
			}
			*part.into += r.last[pid]
		}
	}
	return c, nil
}

// ReadMachine reads what all processors have done since boot: Machine, Steal, Idle,
// and as Softirqd all time in interrupts and softirqs.
func ReadMachine() (CPU, error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return CPU{}, fmt.Errorf("read the machine's processor time: %w", err)
	}
	stat, err := proc.Stat()
	if err != nil {
		return CPU{}, fmt.Errorf("read the machine's processor time: %w", err)
	}
	t := stat.CPUTotal
	interrupts := t.IRQ + t.SoftIRQ
	return CPU{Machine: t.User + t.Nice + t.System + interrupts, Idle: t.Idle + t.Iowait, Steal: t.Steal, Softirqd: interrupts}, nil
}

// ProcessTime returns how many seconds of processor time a process has used with all its threads, including
// those that have ended. It reads the process's processor clock (clock_getcpuclockid(3)),
// which is exact where the times in /proc/PID/stat count hundredths of a second.
func ProcessTime(pid int) (float64, error) {
	var t unix.Timespec
	// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers_types.h.
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("read processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()).Seconds(), nil
}

// Idle says when a process counts as idle: when it has used at most Busy of processor
// time within Window. Wait ends after AtMost.
type Idle struct{ Window, Busy, AtMost time.Duration }

// Wait waits until a process is idle.
func (i Idle) Wait(ctx context.Context, pid int) error {
	for deadline := time.Now().Add(i.AtMost); time.Now().Before(deadline); {
		before, err := ProcessTime(pid)
		if err != nil {
			return err
		}
		if err := lab.Sleep(ctx, i.Window); err != nil {
			return err
		}
		if after, err := ProcessTime(pid); err != nil || after-before <= i.Busy.Seconds() {
			return err
		}
	}
	return nil
}

// InterruptsApart reports whether this kernel accounts interrupts and softirqs to
// no process (CONFIG_IRQ_TIME_ACCOUNTING, kernel/sched/cputime.c). A kernel whose
// configuration can't be read counts as one that doesn't, as most don't.
func InterruptsApart() bool { return interruptsApart(kernelConfig()) }

func interruptsApart(config []byte) bool {
	for line := range bytes.Lines(config) {
		if l := string(bytes.TrimSpace(line)); l == "CONFIG_IRQ_TIME_ACCOUNTING=y" || l == "CONFIG_VIRT_CPU_ACCOUNTING_NATIVE=y" {
			return true
		}
	}
	return false
}

// kernelConfig is the configuration of the running kernel, from the kernel
// itself or from where distributions put it; nil if there is none.
func kernelConfig() []byte {
	if f, err := os.Open("/proc/config.gz"); err == nil {
		defer f.Close()
		if z, err := gzip.NewReader(f); err == nil {
			text, _ := io.ReadAll(z) // as far as it goes
			return text
		}
	}
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease") // empty finds nothing
	running := strings.TrimSpace(string(release))
	for _, name := range []string{"/boot/config-" + running, "/lib/modules/" + running + "/config"} {
		if text, err := os.ReadFile(name); err == nil {
			return text
		}
	}
	return nil
}
