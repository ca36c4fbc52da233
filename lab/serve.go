package lab

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// maxLine bounds a line of the TCP protocol.
const maxLine = 1 << 20

// answers waits as the fault says and reports whether to answer at all. It
// asks anew for each exchange, so a fault changes open connections as well.
func (s *server) answers() bool {
	switch s.current() {
	case Silent, Hang:
		return false
	case Slow:
		return s.sleep(time.Duration(s.delay.Load()))
	}
	return true
}

func (s *server) serveLines(c net.Conn) {
	peer := addressOf(c.RemoteAddr())
	lines := bufio.NewScanner(c)
	lines.Buffer(make([]byte, 0, 4096), maxLine)
	for lines.Scan() {
		if !s.answers() {
			continue
		}
		if _, err := fmt.Fprintf(c, "%s %s %s\n", s.backend.Name, peer, lines.Bytes()); err != nil {
			return
		}
		s.backend.counters.lines.Add(1)
	}
}

func (s *server) serveHTTP(c net.Conn) {
	peer := addressOf(c.RemoteAddr())
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if !s.answers() {
			continue
		}
		if err := s.respond(c, req, peer); err != nil || req.Close {
			return
		}
		s.backend.counters.requests.Add(1)
	}
}

func (s *server) respond(w io.Writer, req *http.Request, peer netip.Addr) error {
	body := fmt.Sprintf("%s %s %s\n", s.backend.Name, peer, req.URL.Path)
	res := http.Response{
		StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Request: req, Close: req.Close,
		Header:        http.Header{"Content-Type": {"text/plain"}},
		ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body)),
	}
	if s.current() == Failing {
		res.StatusCode = http.StatusInternalServerError
	}
	return res.Write(w)
}

func (s *server) serveDatagrams(c *net.UDPConn) {
	buf := make([]byte, 1<<16)
	for {
		n, peer, err := c.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// ICMP errors of earlier answers come back here.
			if !s.sleep(time.Millisecond) {
				return
			}
			continue
		}
		s.backend.counters.datagrams.Add(1)
		payload := bytes.Clone(buf[:n])
		if s.current() == Slow {
			s.wg.Go(func() { s.answerDatagram(c, peer, payload) }) // one slow answer doesn't delay the others
			continue
		}
		s.answerDatagram(c, peer, payload)
	}
}

func (s *server) answerDatagram(c *net.UDPConn, peer netip.AddrPort, payload []byte) {
	if !s.answers() {
		return
	}
	out := fmt.Appendf(nil, "%s %s %s", s.backend.Name, peer.Addr().Unmap(), payload)
	if len(out) > MaxDatagram {
		out = out[:MaxDatagram]
	}
	_, _ = c.WriteToUDPAddrPort(out, peer) // datagrams get lost; so may this one
}

func addressOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
