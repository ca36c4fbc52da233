package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"
)

func readyCommand() *cli.Command {
	return &cli.Command{
		Name:  "ready",
		Usage: "exit 0 if new connections to every service are carried by the kproxy of this container, else 1 and say why; for probes, while another pod's may still have the ports",
		Flags: []cli.Flag{socketFlag()},
		Action: func(c *cli.Context) error {
			why, here, err := clientOf(c).NotReady(c.Context)
			switch {
			case err != nil:
				return err
			case !here:
				return errors.New("not ready: the kproxy of another container serves this node")
			case why != "":
				return fmt.Errorf("not ready: %s", why)
			}
			_, err = fmt.Fprintln(c.App.Writer, "ready")
			return err
		},
	}
}
