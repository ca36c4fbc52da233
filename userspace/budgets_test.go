package userspace

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"kproxy.dev/kproxy/service"
)

func TestBudgetUse(t *testing.T) {
	s := New(Config{})
	if got := s.Budget(service.TCP); got != (BudgetUse{}) {
		t.Errorf("before Listen: %+v", got)
	}
	s.tcpBudget, s.udpBudget = newBudget(4), newBudget(2)
	s.tcpBudget.tryOrWait(fdsPerConnection)
	if got, want := s.Budget(service.TCP), (BudgetUse{Used: 2, Limit: 4}); got != want {
		t.Errorf("TCP: %+v, want %+v", got, want)
	}
	if got, want := s.Budget(service.UDP), (BudgetUse{Limit: 2}); got != want {
		t.Errorf("UDP: %+v, want %+v", got, want)
	}
	s.tcpBudget.release(fdsPerConnection)
	if got := s.Budget(service.TCP).Used; got != 0 {
		t.Errorf("after release: %d used", got)
	}
}

// tableSize returns how many descriptors this process's table holds before it has
// to grow (FDSize in proc_pid_status(5)).
func tableSize(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if size, ok := strings.CutPrefix(line, "FDSize:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(size))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("/proc/self/status has no FDSize")
	return 0
}

func TestListenMakesRoomForDescriptors(t *testing.T) {
	s := New(Config{})
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	defer s.closeAll()
	limit, err := raiseFDs()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := tableSize(t), min(limit, roomAtOnce); got < want {
		t.Errorf("the table holds %d descriptors, want %d at least", got, want)
	}
}
