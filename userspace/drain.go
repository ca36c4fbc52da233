package userspace

import (
	"context"
	"fmt"
	"time"
)

// Drain stops accepting and waits until every connection and session has
// ended; a session has when it is silent for a second. When ctx is done first,
// it ends those that are left, and says how many. After it nothing is left: no
// goroutine, no socket. It may be called instead of ending Run's context, or
// after it.
func (s *Server) Drain(ctx context.Context) error {
	s.stop()
	s.shutGate(ctx)
	gone := make(chan struct{})
	go func() {
		s.flows.Wait()
		close(gone)
	}()
	var err error
	select {
	case <-gone:
	case <-ctx.Done():
		if n := s.killAll(gone); n > 0 {
			err = fmt.Errorf("drain userspace: ended %d connections that were left: %w", n, ctx.Err())
		}
	}
	s.closeAll()
	return err
}

// shutGate lets no session begin any more, once the clients that were on their
// way when accepting stopped have had their time.
func (s *Server) shutGate(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(acceptGrace):
	}
	s.gate.Lock() // what is counted in flows and receivers was counted before
	s.shut = true
	s.gate.Unlock()
	s.hurrySessions()
}

// enter counts a goroutine that begins connections or is a session, unless
// none may begin any more.
func (s *Server) enter() bool {
	s.gate.Lock()
	defer s.gate.Unlock()
	if s.shut {
		return false
	}
	s.flows.Add(1)
	return true
}

// startReceivers starts the UDP listeners' goroutines, unless the end has come.
func (s *Server) startReceivers() {
	s.gate.Lock()
	defer s.gate.Unlock()
	if s.shut {
		return
	}
	for _, w := range s.workers {
		w.started = true
		w.admitPosts()
		s.receivers.Go(w.run)
	}
}

// closeAll frees what is left when no connection and no session is.
func (s *Server) closeAll() {
	s.closeLoops()
	for _, l := range s.tcp {
		l.close()
	}
	for _, w := range s.workers {
		w.close()
	}
	s.prober.mu.Lock() // a Probe ends soon after stop
	for _, l := range s.udp {
		l.closeProber()
	}
	s.prober.mu.Unlock()
	s.receivers.Wait()
	for _, w := range s.workers {
		if !w.started {
			w.release()
		}
	}
	for _, l := range s.udp {
		l.close()
	}
	if s.pipes != nil {
		s.pipes.close()
	}
}

func (s *Server) isStopped() bool {
	select {
	case <-s.stopped:
		return true
	default:
		return false
	}
}

// killAll ends what is in the live table, and what still gets into it, until
// gone. It returns how many there were at first.
func (s *Server) killAll(gone <-chan struct{}) int {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	first := -1
	for {
		left := s.live.all()
		if first < 0 {
			first = len(left)
		}
		for _, f := range left {
			f.kill()
		}
		select {
		case <-gone:
			return first
		case <-tick.C:
		}
	}
}

// stop stops accepting.
func (s *Server) stop() {
	s.stopOnce.Do(func() {
		close(s.stopped)
	})
}
