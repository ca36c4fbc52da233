package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

func pinCommand() *cli.Command {
	return &cli.Command{
		Name:      "pin",
		Usage:     "keep a service in a data plane until `auto`; survives a restart",
		ArgsUsage: "NAMESPACE/NAME[:PORT] userspace|kernel|auto",
		Flags:     []cli.Flag{socketFlag()},
		Action: func(c *cli.Context) error {
			if c.NArg() != 2 {
				return usageError("pin takes a service and one of userspace, kernel, auto")
			}
			ns, name, port, err := parseServiceName(c.Args().Get(0))
			if err != nil {
				return err
			}
			pref := service.Preference(c.Args().Get(1))
			switch pref {
			case service.PreferUserspace, service.PreferKernel, service.PreferAuto:
			default:
				return usageError("data plane %q is not one of userspace, kernel, auto", pref)
			}
			res, err := web.NewClient(c.String("socket")).Pin(c.Context, web.PinRequest{Namespace: ns, Name: name, Port: port, Preference: pref})
			for _, pinned := range res.Pinned {
				fmt.Fprintf(c.App.Writer, "%s: %s\n", pinned, pref)
			}
			return err
		},
	}
}
