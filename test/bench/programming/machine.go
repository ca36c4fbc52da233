package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
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
