package web

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

// takeoverPath is where a kproxy asks the one that runs to become a connection that belongs to the two alone
// (Upgrade, RFC 9110, section 7.8).
const (
	takeoverPath     = "/takeover"
	takeoverProtocol = "kproxy-takeover"
	takeoverTimeout  = 5 * time.Second
)

// takeover leaves the connection to handOver, if it is one of the same user's.
func takeover(handOver func(*net.UnixConn)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !strings.EqualFold(r.Header.Get("Upgrade"), takeoverProtocol) {
			refuse(w, http.StatusUpgradeRequired, "this is for another kproxy, to take over")
			return
		}
		c, ahead, err := http.NewResponseController(w).Hijack()
		if err != nil {
			refuse(w, http.StatusInternalServerError, err.Error())
			return
		}
		conn, unix := c.(*net.UnixConn)
		switch {
		case !unix, ahead.Reader.Buffered() > 0:
			err = errors.New("not a connection that descriptors can be passed by")
		default:
			err = sameUser(conn)
		}
		if err == nil {
			err = conn.SetDeadline(time.Time{}) // of the server
		}
		if err != nil {
			fmt.Fprintf(c, "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(err.Error()), err)
			_ = c.Close()
			return
		}
		if _, err := fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", takeoverProtocol); err != nil {
			_ = c.Close()
			return
		}
		handOver(conn)
	}
}

// sameUser returns an error unless the process at the other end of c is root's or this user's. The mode of the socket keeps
// others away as well, but who takes over gets every connection of the node.
func sameUser(c *net.UnixConn) error {
	peer, err := peerOf(c)
	if err == nil && peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		err = fmt.Errorf("user %d may not take over from user %d", peer.Uid, os.Geteuid())
	}
	return err
}

// peerOf is the process that connected, or that listens, at the other end of c.
func peerOf(c *net.UnixConn) (peer *syscall.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	ctrl := raw.Control(func(fd uintptr) {
		peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	return peer, errors.Join(ctrl, err)
}

// AskToTakeOver connects to the kproxy that has the control socket at path, and returns a connection by which that can
// be taken over. The error says why it can't.
func AskToTakeOver(ctx context.Context, path string) (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(ctx, takeoverTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if err := upgrade(c); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

func upgrade(c net.Conn) error {
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: kproxy\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: 0\r\n\r\n", takeoverPath, takeoverProtocol); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	switch answer.StatusCode {
	case http.StatusSwitchingProtocols:
		if r.Buffered() > 0 {
			return errors.New("it spoke before it was asked")
		}
		return nil
	case http.StatusNotFound:
		return errors.New("it is of a release that can't be taken over")
	}
	why, err := io.ReadAll(io.LimitReader(answer.Body, maxPinBody))
	return errors.Join(fmt.Errorf("it says: %s", why), err)
}
