package handover

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"syscall"
	"time"

	"github.com/fxamacker/cbor/v2"
	"golang.org/x/sys/unix"
)

// Conn is the connection between a kproxy and its successor: messages, each with descriptors. Each is
// preceded by its length and the number of descriptors, 32 bits each in network order, and followed by
// the descriptors, a byte for every perMessage of them. One goroutine uses it at a time.
type Conn struct{ unix *net.UnixConn }

// NewConn takes over c, of which nothing may have been read ahead.
func NewConn(c *net.UnixConn) *Conn { return &Conn{c} }

const (
	// perMessage is how many descriptors one message of a Unix socket has at most (SCM_MAX_FD in
	// include/net/scm.h).
	perMessage = 253
	// maxMessage and maxFiles bound what a stream of garbage makes a process do: more than a million
	// connections need.
	maxMessage = 1 << 30
	maxFiles   = 1 << 23
)

// decoder takes as many connections as there may be; how long a message may be bounds them.
var decoder = func() cbor.DecMode {
	mode, err := cbor.DecOptions{MaxArrayElements: math.MaxInt32}.DecMode()
	if err != nil {
		panic(err) // the options contradict each other
	}
	return mode
}()

// Encode returns m as a process leaves it in a file.
func Encode(m Message) ([]byte, error) { return cbor.Marshal(m) }

// Decode reads what Encode returned.
func Decode(b []byte, m Message) error { return decoder.Unmarshal(b, m) }

// nameOf returns the name that errors give a message.
func nameOf(m Message) string { return reflect.TypeOf(m).Elem().Name() }

// Send sends m and descriptors, which stay the caller's, within a time.
func (c *Conn) Send(within time.Duration, m Message, files ...int) error {
	body, err := cbor.Marshal(m)
	if err != nil {
		return err
	}
	if err := c.unix.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	head = binary.BigEndian.AppendUint32(head, uint32(len(files)))
	if _, err := c.unix.Write(append(head, body...)); err != nil {
		return fmt.Errorf("send %s: %w", nameOf(m), err)
	}
	for len(files) > 0 {
		n := min(len(files), perMessage)
		if _, _, err := c.unix.WriteMsgUnix([]byte{0}, syscall.UnixRights(files[:n]...), nil); err != nil {
			return fmt.Errorf("send descriptors: %w", err)
		}
		files = files[n:]
	}
	return nil
}

// Receive receives m, within a time, and its descriptors, which are closed on exec and the caller's;
// none after an error.
func (c *Conn) Receive(within time.Duration, m Message) ([]int, error) {
	if err := c.unix.SetDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	files, err := c.receive(m)
	if err != nil {
		CloseFiles(files)
		return nil, fmt.Errorf("receive %s: %w", nameOf(m), err)
	}
	return files, nil
}

func (c *Conn) receive(m Message) (files []int, err error) {
	var head [8]byte
	if _, err := io.ReadFull(c.unix, head[:]); err != nil {
		return nil, err
	}
	size, count := binary.BigEndian.Uint32(head[:]), int(binary.BigEndian.Uint32(head[4:]))
	if size > maxMessage || count > maxFiles {
		return nil, fmt.Errorf("%d bytes and %d descriptors are too many", size, count)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.unix, body); err != nil {
		return nil, unexpected(err)
	}
	decoded := make(chan error, 1)
	go func() { decoded <- decoder.Unmarshal(body, m) }() // while descriptors come
	files, err = c.descriptors(count)
	return files, cmp.Or(<-decoded, err)
}

// descriptors receives so many; after an error those until then.
func (c *Conn) descriptors(count int) (files []int, err error) {
	for oob := make([]byte, syscall.CmsgSpace(4*perMessage)); len(files) < count; {
		n, oobn, flags, _, err := c.unix.ReadMsgUnix(make([]byte, 1), oob)
		if err != nil || n == 0 {
			return files, unexpected(err)
		}
		more, err := rights(oob[:oobn])
		files = append(files, more...)
		switch {
		case err != nil:
			return files, err
		case flags&syscall.MSG_CTRUNC != 0:
			return files, fmt.Errorf("only %d of %d descriptors could be received: %w (ulimit -n)", len(files), count, syscall.EMFILE)
		case len(more) == 0:
			return files, errors.New("descriptors are missing")
		}
	}
	return files, nil
}

func unexpected(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// rights returns the descriptors in a control message.
func rights(oob []byte) (files []int, err error) {
	messages, err := syscall.ParseSocketControlMessage(oob)
	for i := range messages {
		more, wrong := syscall.ParseUnixRights(&messages[i])
		files, err = append(files, more...), errors.Join(err, wrong)
	}
	return files, err
}

// Decided ends what may be received, and reports whether m had arrived before: from then on the
// other side can't send it any more. A process that isn't going to wait longer calls it before it acts on that.
func (c *Conn) Decided(m Message) bool {
	if err := c.unix.CloseRead(); err != nil {
		return false // the connection is closed
	}
	files, err := c.Receive(time.Second, m)
	CloseFiles(files)
	return err == nil
}

// Ended waits until the other side has closed the connection or ended.
func (c *Conn) Ended() {
	if c.unix.SetDeadline(time.Time{}) == nil {
		_, _ = c.unix.Read(make([]byte, 1))
	}
}

// Close closes the connection; whatever uses it fails.
func (c *Conn) Close() { _ = c.unix.Close() }

// CloseFiles closes descriptors.
func CloseFiles(files []int) {
	for _, fd := range files {
		_ = syscall.Close(fd)
	}
}

// ListenerFile returns a descriptor of l, which the caller closes. [net.TCPListener.File] would make the socket, which
// both share, a blocking one.
func ListenerFile(l net.Listener) (fd int, err error) {
	raw, err := l.(syscall.Conn).SyscallConn()
	if err != nil {
		return -1, err
	}
	if ctrl := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); ctrl != nil {
		return -1, ctrl
	}
	return fd, err
}

// FileListener returns the listener of a descriptor, which it takes over.
func FileListener(fd int, name string) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return net.FileListener(f)
}
