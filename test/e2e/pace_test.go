package e2e

import (
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
)

// slow is how many times slower than a usual machine this one is: an emulated
// one says so in $KPROXY_E2E_SLOW.
var slow = max(1, number(os.Getenv("KPROXY_E2E_SLOW")))

// pace is what a slow machine stretches by whatever takes its time on every
// machine. It is less than slow, as most of such a time is spent waiting.
var pace = math.Round(math.Sqrt(slow))

func number(s string) float64 {
	n, _ := strconv.ParseFloat(s, 64) // else as if it were unset
	return n
}

// within stretches how long something may take at most. Nobody waits that long
// unless the test fails.
func within(d time.Duration) time.Duration { return time.Duration(slow * float64(d)) }

// patience returns how long to wait for what takes d at most where nothing else runs: beside a load, as many times longer as tasks
// share a processor (proc_loadavg(5)), within bounds.
func patience(d time.Duration) time.Duration {
	text, _ := os.ReadFile("/proc/loadavg") // else as if there were no load
	load, _, _ := strings.Cut(string(text), " ")
	return time.Duration(min(mostPatience, max(1, number(load)/float64(runtime.NumCPU()))) * float64(within(d)))
}

const mostPatience = 6

// lasting stretches what really takes so long: kproxy's own intervals, and how
// long a test gives something the chance to go wrong.
func lasting(d time.Duration) time.Duration { return time.Duration(pace * float64(d)) }

// sleep waits for lasting(d).
func sleep(d time.Duration) { time.Sleep(lasting(d)) }

// thinned lowers how much comes at a time, so that a slow machine has time left
// for all that goes on besides.
func thinned(rate float64) float64 { return rate / slow }

// preferences are the data planes that a test tries in turn whose userspace does the same on every kernel: on a slow machine
// the kernel's alone.
func preferences() []service.Preference {
	if slow > 1 {
		return []service.Preference{service.PreferKernel}
	}
	return []service.Preference{service.PreferUserspace, service.PreferKernel}
}
