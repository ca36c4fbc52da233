package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"

	"golang.org/x/sys/unix"
)

// Server says where to serve.
type Server struct {
	Namespaces []string `json:"namespaces"` // as `ip netns` knows them
}

// Serve serves every kind of load on all addresses of the namespaces until ctx
// ends; enter runs a function in a namespace. It calls ready when it listens.
// Its threads end with the process.
func Serve(ctx context.Context, s Server, enter func(namespace string, f func() error) error, ready func()) error {
	handlers := []struct {
		kind  Kind
		serve func(socket, []byte)
	}{{Throughput, drain}, {Requests, echo}, {Connections, answer}}
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), len(s.Namespaces)*MaxWorkers*(len(handlers)+1)+2))
	for _, ns := range s.Namespaces {
		for _, h := range handlers {
			l, err := listen(ns, enter, h.kind)
			if err != nil {
				return err
			}
			for range MaxWorkers {
				go accept(l, h.serve)
			}
		}
		u, err := listen(ns, enter, Datagrams)
		if err != nil {
			return err
		}
		for range MaxWorkers {
			go reflect(u)
		}
	}
	ready()
	<-ctx.Done()
	return nil
}

// listen opens a socket in a namespace.
func listen(namespace string, enter func(string, func() error) error, k Kind) (s socket, err error) {
	udp := k == Datagrams
	err = enter(namespace, func() error {
		kind := unix.SOCK_STREAM
		if udp {
			kind = unix.SOCK_DGRAM
		}
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s = socket(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
		if err := s.bind(k.Port()); err != nil || udp {
			return err
		}
		return unix.Listen(fd, 1024)
	})
	if err != nil {
		return s, fmt.Errorf("listen in %s: %w", namespace, err)
	}
	return s, nil
}

// accept serves one connection at a time.
func accept(l socket, serve func(socket, []byte)) {
	runtime.LockOSThread()
	buffer := make([]byte, streamBuffer)
	for {
		fd, _, err := unix.Accept4(int(l), unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL) {
			return // the socket is no listener any more
		}
		if err != nil {
			continue // the peer is gone, or a signal came
		}
		s := socket(fd)
		if s.bound() == nil {
			serve(s, buffer)
		}
		s.close()
	}
}

// drain reads to the end and confirms the count.
func drain(s socket, buffer []byte) {
	var total uint64
	for {
		n, err := s.read(buffer)
		total += uint64(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return
		}
	}
	_ = s.write(binary.BigEndian.AppendUint64(nil, total)) // a client that is gone misses it
}

// echo answers until the end.
func echo(s socket, buffer []byte) {
	_ = unix.SetsockoptInt(int(s), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // else it is slower, not wrong
	for {
		n, err := s.read(buffer)
		if err != nil || s.write(buffer[:n]) != nil {
			return
		}
	}
}

// answer answers once.
func answer(s socket, buffer []byte) {
	request := buffer[:messageSize]
	if s.readFull(request) == nil {
		_ = s.write(request) // a client that is gone misses it
	}
}

// reflect sends datagrams back.
func reflect(s socket) {
	runtime.LockOSThread()
	buffer := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(int(s), buffer, 0)
		if errors.Is(err, unix.EBADF) {
			return
		}
		if err == nil {
			_ = unix.Sendto(int(s), buffer[:n], 0, from) // datagrams get lost; so may this one
		}
	}
}
