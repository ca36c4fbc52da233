package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// preferences are the data planes to pin to.
var preferences = []string{string(service.PreferUserspace), string(service.PreferKernel), string(service.PreferAuto)}

func pinCommand() *cli.Command {
	return &cli.Command{
		Name:      "pin",
		Usage:     "keep a service in a data plane until `auto`; survives a restart",
		ArgsUsage: targetUsage + " userspace|kernel|auto",
		Flags:     []cli.Flag{socketFlag()},
		Action: func(c *cli.Context) error {
			if c.NArg() != 2 {
				return usageError("pin takes a service and one of userspace, kernel, auto")
			}
			which, err := parseTarget(c.Args().Get(0))
			if err != nil {
				return err
			}
			pref := service.Preference(c.Args().Get(1))
			if err := oneOf("data plane", string(pref), preferences...); err != nil {
				return err
			}
			client := clientOf(c)
			requests, err := which.pins(c.Context, client, pref)
			for i := 0; i < len(requests) && err == nil; i++ {
				var res web.PinResult
				res, err = client.Pin(c.Context, requests[i])
				for _, pinned := range res.Pinned {
					fmt.Fprintf(c.App.Writer, "%s: %s\n", pinned, pref)
				}
			}
			return err
		},
	}
}

// pins are the requests that pin the service ports which t names: one for a name,
// which kproxy looks up itself.
func (t *target) pins(ctx context.Context, client *web.Client, pref service.Preference) ([]web.PinRequest, error) {
	if t.name != "" {
		return []web.PinRequest{{Namespace: t.namespace, Name: t.name, Port: t.port, Preference: pref}}, nil
	}
	services, err := t.lookUp(ctx, client)
	var requests []web.PinRequest
	for i := range services {
		requests = append(requests, pinRequest(&services[i], pref))
	}
	return requests, err
}

// pinRequest pins one service port.
func pinRequest(s *plan.ServiceStatus, pref service.Preference) web.PinRequest {
	return web.PinRequest{Namespace: s.Namespace, Name: s.Name, Port: s.PortName(), Preference: pref}
}
