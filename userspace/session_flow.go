package userspace

import "kproxy.dev/kproxy/service"

// What others than its worker may ask of a session.

// kill implements flow.
func (x *session) kill() { x.worker.post(x.end) }

// describe implements flow.
func (x *session) describe() Connection {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := Connection{
		Protocol: service.UDP, Client: x.route.client, Address: x.route.orig, Started: x.started,
		BytesIn: x.meters[clientSide].count.Load(), BytesOut: x.meters[endpointSide].count.Load(),
	}
	if x.route.front.view != nil {
		c.Service = x.route.front.view.state.key
	}
	if x.endpoint != nil {
		c.Endpoint = x.endpoint.address
	}
	return c
}

// settle implements flow.
func (x *session) settle() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.endpoint == nil {
		return
	}
	s := x.route.front.view.state
	x.meters[clientSide].settle(&s.counters.bytesIn, &x.endpoint.counters.bytesIn)
	x.meters[endpointSide].settle(&s.counters.bytesOut, &x.endpoint.counters.bytesOut)
}

// endSessions ends the sessions that have lost their service or endpoint.
func (s *Server) endSessions() {
	s.eachUDPWorker(func(w *udpWorker) {
		for _, x := range w.sessions {
			x.follow()
		}
	})
}

// hurrySessions has every session look at its idle time again.
func (s *Server) hurrySessions() {
	s.eachUDPWorker(func(w *udpWorker) {
		for _, x := range w.sessions {
			if x.timer.at != 0 {
				w.timers.set(&x.timer, w.now+int64(trustFor))
			}
		}
	})
}
