package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxLine bounds a line of the TCP protocol.
const maxLine = 1 << 20

// answers reports whether the fault lets it answer. It is asked anew for each
// exchange, so a fault changes open connections as well.
func (s *server) answers() bool {
	f := s.current()
	return f != Silent && f != Hang
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

// serveDatagrams answers from the address that it was asked at: the one that a redirect
// chose, where there was one, or else conntrack wouldn't know the answer for one.
func (s *server) serveDatagrams(c *net.UDPConn) {
	buf, oob := make([]byte, 1<<16), make([]byte, 64)
	for {
		n, m, _, peer, err := c.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// ICMP errors of earlier answers come back here.
			if Sleep(s.ctx, time.Millisecond) != nil {
				return
			}
			continue
		}
		if !s.answers() {
			continue
		}
		out := fmt.Appendf(nil, "%s %s %s", s.backend.Name, peer.Addr().Unmap(), buf[:n])
		if len(out) > MaxDatagram {
			out = out[:MaxDatagram]
		}
		_, _, _ = c.WriteMsgUDPAddrPort(out, anyInterface(oob[:m]), peer) // datagrams get lost; so may this one
	}
}

// wantDestinations asks for the address that each datagram was sent to. An answer may
// come from one that isn't this host's, but led here.
func wantDestinations(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		if domain, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN); domain == unix.AF_INET {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_PKTINFO, 1)
			return
		}
		set = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1), unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1))
	})
	return errors.Join(err, set)
}

// anyInterface takes the interface out of a control message: in_pktinfo begins with it,
// in6_pktinfo ends with it.
func anyInterface(oob []byte) []byte {
	at := unix.CmsgLen(0)
	if len(oob) == unix.CmsgSpace(unix.SizeofInet6Pktinfo) {
		at += net.IPv6len
	}
	if len(oob) >= at+4 {
		clear(oob[at : at+4])
	}
	return oob
}

func addressOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
