package userspace

import "kproxy.dev/kproxy/service"

// BudgetUse is how much of the file descriptors for forwarding one protocol uses.
type BudgetUse struct {
	Used, Limit int
	Waiting     int // listeners that accept nobody until one is free
}

// Budget returns that of TCP or UDP; zero before Listen.
func (s *Server) Budget(p service.Protocol) BudgetUse {
	b := s.tcpBudget
	if p == service.UDP {
		b = s.udpBudget
	}
	if b == nil {
		return BudgetUse{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return BudgetUse{Used: b.size - b.free, Limit: b.size, Waiting: b.waiting}
}
