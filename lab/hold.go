package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// HoldConfig describes a connection that is held open and used now and then.
type HoldConfig struct {
	From    *Namespace
	Network string // "tcp" or "udp"
	Target  netip.AddrPort
	Every   time.Duration // between two exchanges; 0 means 50ms
	Timeout time.Duration // of connect and of each exchange; 0 means 2s
}

// Held is a connection that is held open.
type Held struct {
	config HoldConfig
	conn   net.Conn
	first  Answer
	cancel context.CancelFunc
	done   chan struct{}

	exchanges atomic.Int64

	mu  sync.Mutex // the holder writes while others read
	err error
}

// Hold opens a connection, makes the first exchange, and then one every
// c.Every in the background. The connection counts as broken when an exchange
// fails or a TCP connection is answered by another backend than at first. It is
// held until Close or the end of ctx.
func Hold(ctx context.Context, c HoldConfig) (*Held, error) {
	if c.Every == 0 {
		c.Every = 50 * time.Millisecond
	}
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	h := &Held{config: c, done: make(chan struct{})}
	dial, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	var err error
	if h.conn, err = c.From.Dial(dial, c.Network, c.Target.String()); err != nil {
		return nil, fmt.Errorf("hold connection: %w", err)
	}
	if h.first, err = h.exchange(); err != nil {
		h.conn.Close()
		return nil, fmt.Errorf("hold connection: %w", err)
	}
	ctx, h.cancel = context.WithCancel(ctx)
	go h.run(ctx)
	return h, nil
}

func (h *Held) run(ctx context.Context) {
	defer close(h.done)
	defer h.conn.Close()
	tick := time.NewTicker(h.config.Every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if _, err := h.exchange(); err != nil {
			h.mu.Lock()
			h.err = err
			h.mu.Unlock()
			return
		}
	}
}

func (h *Held) exchange() (Answer, error) {
	n := h.exchanges.Load()
	_ = h.conn.SetDeadline(time.Now().Add(h.config.Timeout)) // fails only on a closed connection; so does the exchange
	a, err := exchange(h.conn, h.config.Network, fmt.Sprint(n))
	if err != nil {
		return a, fmt.Errorf("exchange %d at %s: %w", n, time.Now().Format("15:04:05.000"), err)
	}
	if n > 0 && h.config.Network == "tcp" && a.Backend != h.first.Backend {
		return a, fmt.Errorf("exchange %d: answered by %s, opened to %s", n, a.Backend, h.first.Backend)
	}
	h.exchanges.Add(1)
	return a, nil
}

// First is the first answer: which backend it is, and which client it saw.
func (h *Held) First() Answer { return h.first }

// LocalAddr is the client's end.
func (h *Held) LocalAddr() netip.AddrPort {
	switch a := h.conn.LocalAddr().(type) {
	case *net.TCPAddr:
		return a.AddrPort()
	case *net.UDPAddr:
		return a.AddrPort()
	}
	return netip.AddrPort{}
}

// Exchanges returns how many exchanges have succeeded.
func (h *Held) Exchanges() int { return int(h.exchanges.Load()) }

// Err says why the connection broke; nil if it hasn't.
func (h *Held) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Close ends it and returns Err.
func (h *Held) Close() error {
	h.cancel()
	<-h.done
	return h.Err()
}
