package subject

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// processes are the proxy's process and its children.
func (r *Rig) processes() ([]int, error) {
	if r.proxy == nil {
		return nil, nil
	}
	pid := r.proxy.PID()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return nil, fmt.Errorf("list children of %s: %w", r.Subject.Name, err)
	}
	out := []int{pid}
	for field := range strings.FieldsSeq(string(text)) {
		child, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("list children of %s: %w", r.Subject.Name, err)
		}
		out = append(out, child)
	}
	return out, nil
}

// stopProxy ends the proxy's process and its children, which keep a copy of its
// output open: nobody could wait for it while they live. kproxy is asked to end,
// so that the next one finds nothing of it.
func (r *Rig) stopProxy() error {
	if r.proxy == nil || !r.proxy.Running() {
		return nil
	}
	if r.client != nil {
		return r.proxy.Stop(10 * time.Second)
	}
	pids, err := r.processes()
	if err != nil {
		return errors.Join(err, r.proxy.Kill())
	}
	_ = unix.Kill(pids[0], unix.SIGSTOP) // nginx would start others instead
	for _, pid := range pids[1:] {
		_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
	}
	return r.proxy.Kill()
}

// Memory is what the proxy's processes have of the machine's memory, in bytes
// (VmRSS of proc_pid_status(5)); 0 without a proxy.
func (r *Rig) Memory() (uint64, error) {
	pids, err := r.processes()
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", r.Subject.Name, err)
		}
		_, after, _ := strings.Cut(string(text), "VmRSS:")
		var kib uint64
		if _, err := fmt.Sscanf(after, "%d kB", &kib); err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", r.Subject.Name, err)
		}
		sum += kib << 10
	}
	return sum, nil
}
