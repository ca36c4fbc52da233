package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/web"
)

// clientOf returns a client for the kproxy that c is about: the one at --socket,
// else the one that runs on this host, else a lab's, which it says.
func clientOf(c *cli.Context) *web.Client {
	socket := c.String("socket")
	if !c.IsSet("socket") {
		if socket = socketOf(socket, labSocket); socket == labSocket {
			fmt.Fprintf(c.App.ErrWriter, "kproxy: none runs on this host; this is the lab's, at %s\n", socket)
		}
	}
	return web.NewClient(socket)
}

// socketOf returns lab if a process listens there and none at host.
func socketOf(host, lab string) string {
	if !listens(host) && listens(lab) {
		return lab
	}
	return host
}

// listens reports whether a process listens on a control socket, be it one that
// this user may not talk to.
func listens(socket string) bool {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED)
	}
	c.Close()
	return true
}
