package main

import (
	"fmt"

	"github.com/urfave/cli/v2"
)

func manCommand() *cli.Command {
	return &cli.Command{
		Name: "man", Usage: "print kproxy's man page, kproxy(8), for kproxy man >kproxy.8",
		Action: func(c *cli.Context) error {
			page, err := c.App.ToMan()
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(c.App.Writer, page)
			return err
		},
	}
}
