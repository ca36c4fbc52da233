package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
)

func drainCommand() *cli.Command {
	return &cli.Command{
		Name: "drain",
		Usage: "have load balancers leave this node out, and new connections go to the kernel where it can take them; those that there are go on; " +
			"holds until --undo, over restarts too",
		Flags: []cli.Flag{
			socketFlag(),
			&cli.BoolFlag{Name: "undo", Usage: "end it"},
			&cli.BoolFlag{Name: "wait", Usage: "wait until the TCP connections of userspace have ended, but those begun since to services that stay there; exit 1 if that takes longer than --timeout"},
			&cli.DurationFlag{Name: "timeout", Value: 5 * time.Minute, Usage: "how long --wait waits"},
		},
		Action: func(c *cli.Context) error {
			if c.Bool("undo") && c.Bool("wait") {
				return usageError("drain takes one of --undo and --wait")
			}
			client := clientOf(c)
			if err := client.Drain(c.Context, !c.Bool("undo")); err != nil {
				return err
			}
			if c.Bool("undo") {
				_, err := fmt.Fprintln(c.App.Writer, "not drained any more")
				return err
			}
			var said string
			for end := time.Now().Add(c.Duration("timeout")); ; {
				st, err := client.Status(c.Context)
				if err != nil {
					return err
				}
				if st.Drain == nil {
					return errors.New("the drain was ended meanwhile")
				}
				if now := screen.DrainTitle(st.Drain); now != said {
					fmt.Fprintln(c.App.Writer, now)
					said = now
				}
				switch {
				case !c.Bool("wait") || st.Drain.Left == 0:
					return nil
				case time.Now().After(end):
					return fmt.Errorf("not drained after %s", c.Duration("timeout"))
				}
				if !sleep(c.Context, time.Second) {
					return c.Context.Err()
				}
			}
		},
	}
}
