package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CPU is what the processors did while a load ran, in seconds of one processor.
//
// What the kernel forwards, it forwards on somebody's time: mostly in the
// system call of whoever sends (the end of veth_xmit raises the softirq, and
// local_bh_enable runs it), and under load in ksoftirqd. So the time of a data
// plane in the kernel shows in Client, Backend and Softirqd, and only in the
// sum compared to that of a run without the data plane can it be told.
type CPU struct {
	Client   float64 `json:"client"`   // the load's process
	Backend  float64 `json:"backend"`  // the server's process
	Proxy    float64 `json:"proxy"`    // the proxy's process, or processes
	Softirqd float64 `json:"softirqd"` // the kernel's threads for softirqs
	// SoftIRQ is the time in interrupts and softirqs where the kernel accounts it
	// to no process ([InterruptsApart]); else 0, as it is in the others.
	SoftIRQ float64 `json:"softirq"`
	// Machine is the time of all processors that weren't idle; what exceeds Total
	// is others' work.
	Machine float64 `json:"machine"`
	Steal   float64 `json:"steal"` // that the hypervisor gave to others
	Idle    float64 `json:"idle"`
}

// Total is what the load cost: client, server, proxy, and the kernel's part.
func (c CPU) Total() float64 { return c.Client + c.Backend + c.Proxy + c.Softirqd + c.SoftIRQ }

// Others is what the machine did besides; sampling may make it negative, which is 0.
func (c CPU) Others() float64 { return max(0, c.Machine-c.Total()) }

// Minus is the difference of two readings.
func (c CPU) Minus(b CPU) CPU {
	return CPU{
		c.Client - b.Client, c.Backend - b.Backend, c.Proxy - b.Proxy, c.Softirqd - b.Softirqd,
		c.SoftIRQ - b.SoftIRQ, c.Machine - b.Machine, c.Steal - b.Steal, c.Idle - b.Idle,
	}
}

// ticks is the unit of times in /proc/stat: USER_HZ is 100 on every architecture
// that Go runs on (linux/include/asm-generic/param.h).
const ticks = 100

// CPUReader reads what the processors have done so far.
type CPUReader struct {
	backend  int
	proxies  []int
	softirqd []int
	apart    bool
}

// NewCPUReader tells a server's process and those of a proxy apart; 0 is none.
func NewCPUReader(backend int, proxies ...int) *CPUReader {
	apart, _ := InterruptsApart()
	return &CPUReader{backend: backend, proxies: proxies, softirqd: kernelThreads("ksoftirqd/"), apart: apart}
}

// kernelThreads finds those whose names begin with prefix. In a PID namespace
// there are none to be seen.
func kernelThreads(prefix string) []int {
	names, _ := filepath.Glob("/proc/[0-9]*/comm") // the pattern is well-formed
	var out []int
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(comm), prefix) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// Read reads it; the calling process is the client. Only differences mean something.
func (r *CPUReader) Read() (c CPU, err error) {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return c, fmt.Errorf("read own processor time: %w", err)
	}
	c.Client = time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	if c.Backend, err = ProcessTime(r.backend); err != nil {
		return c, err
	}
	for _, pid := range r.proxies {
		t, err := ProcessTime(pid)
		if err != nil {
			return c, err
		}
		c.Proxy += t
	}
	for _, pid := range r.softirqd {
		t, err := ProcessTime(pid)
		if err != nil && !errors.Is(err, unix.EINVAL) { // its processor was taken offline
			return c, err
		}
		c.Softirqd += t
	}
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return c, fmt.Errorf("read the machine's processor time: %w", err)
	}
	return c, c.machine(string(text), r.apart)
}

// ProcessTime is what a process with all its threads has used, also those that
// have ended; 0 for pid 0. It reads the process's processor clock (clock_getcpuclockid(3)),
// which is exact where the times in /proc/PID/stat count hundredths of a second.
func ProcessTime(pid int) (float64, error) {
	if pid == 0 {
		return 0, nil
	}
	var t unix.Timespec
	// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers_types.h.
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("read processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()).Seconds(), nil
}

// Idle is when a process has nothing to do: it used at most Busy of its processor's
// time within Window.
type Idle struct {
	Window, Busy time.Duration
	AtMost       time.Duration // nobody waits longer
}

// Wait waits until a process is idle.
func (i Idle) Wait(ctx context.Context, pid int) error {
	for deadline := time.Now().Add(i.AtMost); time.Now().Before(deadline); {
		before, err := ProcessTime(pid)
		if err != nil {
			return err
		}
		select {
		case <-time.After(i.Window):
		case <-ctx.Done():
			return ctx.Err()
		}
		if after, err := ProcessTime(pid); err != nil || after-before <= i.Busy.Seconds() {
			return err
		}
	}
	return nil
}

// machine reads the first line of /proc/stat (proc_stat(5)).
func (c *CPU) machine(text string, apart bool) error {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return fmt.Errorf("read the machine's processor time: %q is no line of /proc/stat", line)
	}
	var v [8]float64 // user nice system idle iowait irq softirq steal
	for i := range v {
		n, err := strconv.ParseUint(fields[i+1], 10, 64)
		if err != nil {
			return fmt.Errorf("read the machine's processor time: %w", err)
		}
		v[i] = float64(n) / ticks
	}
	c.Machine = v[0] + v[1] + v[2] + v[5] + v[6]
	c.Idle, c.Steal = v[3]+v[4], v[7]
	if apart {
		c.SoftIRQ = v[5] + v[6]
	}
	return nil
}

// InterruptsApart reports whether this kernel takes the time of interrupts and
// softirqs off the processes they interrupt (CONFIG_IRQ_TIME_ACCOUNTING,
// kernel/sched/cputime.c), and whether its configuration could be read. One
// that couldn't is taken for one that doesn't, as most don't.
func InterruptsApart() (apart, known bool) {
	config, err := kernelConfig()
	return err == nil && interruptsApart(config), err == nil
}

func interruptsApart(config []byte) bool {
	lines := bufio.NewScanner(bytes.NewReader(config))
	for lines.Scan() {
		switch lines.Text() {
		case "CONFIG_IRQ_TIME_ACCOUNTING=y", "CONFIG_VIRT_CPU_ACCOUNTING_NATIVE=y":
			return true
		}
	}
	return false
}
