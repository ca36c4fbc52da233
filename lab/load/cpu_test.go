package load

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMachineTime(t *testing.T) {
	before, err := ReadMachine()
	if err != nil {
		t.Fatal(err)
	}
	for start := time.Now(); time.Since(start) < 200*time.Millisecond; {
	}
	after, err := ReadMachine()
	if err != nil {
		t.Fatal(err)
	}
	// Steal may have taken all of it; the unit is a hundredth of a second.
	if spent := after.minus(before); spent.Machine+spent.Steal < 0.1 || spent.Idle < 0 || spent.Softirqd > spent.Machine {
		t.Errorf("200 ms at work: %+v", spent)
	}
}

func TestProcessTime(t *testing.T) {
	before, err := ProcessTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	after, err := ProcessTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// Both read the same clock, in this order.
	own := time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	const rounding = 1e-5 // getrusage's, to microseconds, twice
	if own < before-rounding || own > after+rounding {
		t.Errorf("getrusage says %g s, want it between %g and %g", own, before, after)
	}
	if _, err := ProcessTime(1 << 22); err == nil { // PID_MAX_LIMIT: none has it
		t.Error("of a process that doesn't exist: no error")
	}
}

// TestEndedProcess: what a proxy's short-lived child has used stays counted after its end, and the load goes on.
func TestEndedProcess(t *testing.T) {
	child := exec.Command("/bin/sh", "-c", "read line")
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	r := newCPUReader(nil, []int{child.Process.Pid})
	during, err := r.read()
	if err != nil {
		t.Fatal(err)
	}
	_ = stdin.Close()
	_ = child.Wait() // read's status is 1 at the end of its input
	after, err := r.read()
	if err != nil || after.Proxy < during.Proxy || during.Proxy == 0 {
		t.Errorf("%v: %g s after the end, %g s before", err, after.Proxy, during.Proxy)
	}
	if neverSeen, err := newCPUReader(nil, []int{child.Process.Pid}).read(); err != nil || neverSeen.Proxy != 0 {
		t.Errorf("%v: %g s of one that had ended before", err, neverSeen.Proxy)
	}
}

func TestInterruptsApart(t *testing.T) {
	for config, want := range map[string]bool{
		"": false,
		"# CONFIG_IRQ_TIME_ACCOUNTING is not set\nCONFIG_TICK_CPU_ACCOUNTING=y\n": false,
		"CONFIG_SMP=y\nCONFIG_IRQ_TIME_ACCOUNTING=y\n":                            true,
	} {
		if got := interruptsApart([]byte(config)); got != want {
			t.Errorf("%q: %v, want %v", config, got, want)
		}
	}
}

func TestTotal(t *testing.T) {
	c := CPU{Client: 1, Backend: 2, Proxy: 3, Softirqd: 9, Machine: 16}
	if c.Total() != 15 || c.Others() != 1 {
		t.Errorf("total %g and others %g, want 15 and 1", c.Total(), c.Others())
	}
	if c.Machine = 14; c.Others() != 0 {
		t.Errorf("others %g of less than nothing, want 0", c.Others())
	}
}

func TestIdle(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		name string
		idle Idle
		ctx  context.Context
		pid  int
		want error
	}{
		{"idle", Idle{time.Microsecond, time.Hour, time.Hour}, t.Context(), os.Getpid(), nil},
		{"never", Idle{time.Microsecond, -time.Second, time.Millisecond}, t.Context(), os.Getpid(), nil},
		{"not to wait", Idle{time.Hour, 0, 0}, t.Context(), os.Getpid(), nil},
		{"given up", Idle{time.Hour, 0, time.Hour}, over, os.Getpid(), context.Canceled},
		{"no process", Idle{time.Hour, 0, time.Hour}, t.Context(), 1 << 22, unix.EINVAL},
	} {
		if err := tt.idle.Wait(tt.ctx, tt.pid); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}
