package userspace

import (
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
