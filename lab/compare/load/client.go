package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	messageSize  = 64        // bytes of a request, and of its answer
	streamBuffer = 256 << 10 // of one write of a stream
)

// stream sends until the deadline, then waits until the server has confirmed
// every byte.
func (w *worker) stream() error {
	target := w.target(0)
	s, err := dialTCP(target)
	if err != nil {
		return err
	}
	defer s.close()
	w.witness(s, target)
	var sent uint64
	for sent < MaxBytes && time.Now().Before(w.deadline) {
		if err := s.write(w.buffer); err != nil {
			return err
		}
		sent += uint64(len(w.buffer))
	}
	if err := unix.Shutdown(int(s), unix.SHUT_WR); err != nil {
		return fmt.Errorf("end stream: %w", err)
	}
	var confirmed [8]byte
	if err := s.readFull(confirmed[:]); err != nil {
		return fmt.Errorf("wait for the server's count: %w", err)
	}
	w.bytes = binary.BigEndian.Uint64(confirmed[:])
	if w.bytes != sent {
		return fmt.Errorf("the server got %d bytes of %d", w.bytes, sent)
	}
	return nil
}

// connection is one new connection with one exchange.
func (w *worker) connection(i int, end func(socket) error) error {
	target := w.target(i)
	start := time.Now()
	s, err := dialTCP(target)
	if err != nil {
		return err
	}
	defer s.close()
	connected := time.Since(start)
	if err := w.exchangeOn(s); err != nil {
		return err
	}
	exchanged := time.Since(start)
	w.witness(s, target)
	if err := end(s); err != nil {
		return err
	}
	w.connect, w.exchange = append(w.connect, connected), append(w.exchange, exchanged)
	return nil
}

// awaitClose waits for the server's close, so that TIME_WAIT is the server's
// and the client's port is free for the next connection to the same address.
func (s socket) awaitClose() error {
	var b [1]byte
	if _, err := s.read(b[:]); !errors.Is(err, io.EOF) {
		return fmt.Errorf("wait for the server's close: %w", err)
	}
	return nil
}

// abort has close(2) reset the connection. Nobody keeps it in TIME_WAIT then,
// where a later one through another service might meet it: to the client those
// are two destinations, with timestamps that have nothing to do with each other
// (secure_tcp_ts_off), to the backend it is one peer, whose SYN it may take for an
// old one (PAWS, RFC 7323 section 5). Some connects took a second; that this was
// the reason isn't proved.
func (s socket) abort() error {
	if err := unix.SetsockoptLinger(int(s), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("have the close reset a connection: %w", err)
	}
	return nil
}

func (w *worker) exchangeOn(s socket) error {
	if err := s.write(w.buffer); err != nil {
		return err
	}
	return s.readFull(w.buffer)
}

// exchanges go one after the other on one connection, or UDP session. A lost
// datagram ends them: there is nothing between client and server that may lose one.
func (w *worker) exchanges(ctx context.Context, dial func(netip.AddrPort) (socket, error)) {
	target := w.target(0)
	s, err := dial(target)
	if err != nil {
		w.note(err)
		return
	}
	defer s.close()
	w.witness(s, target)
	for w.more(ctx) && w.err == nil {
		start := time.Now()
		err := w.exchangeOn(s)
		if err == nil {
			w.exchange = append(w.exchange, time.Since(start))
		}
		w.note(err)
	}
}

// session is one exchange over UDP from a port of its own: to conntrack, a
// datagram from a port that was used before belongs to the flow of then.
func (w *worker) session(i int) error {
	target := w.target(i)
	start := time.Now()
	s, err := openSocket(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.bind(w.load.FirstPort + uint16(w.number*w.count+i)); err != nil {
		return err
	}
	if err := s.connect(target); err != nil {
		return err
	}
	if err := w.exchangeOn(s); err != nil {
		return err
	}
	w.exchange = append(w.exchange, time.Since(start))
	w.witness(s, target)
	return nil
}
