package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

func connectionsCommand() *cli.Command {
	return &cli.Command{
		Name:      "connections",
		Usage:     "list live connections in every data plane",
		ArgsUsage: "[NAMESPACE/NAME[:PORT]]",
		Flags:     []cli.Flag{socketFlag(), outputFlag("table", "json")},
		Action: func(c *cli.Context) error {
			if err := oneService(c); err != nil {
				return err
			}
			rows, err := web.NewClient(c.String("socket")).Connections(c.Context, c.Args().First())
			if err != nil {
				return err
			}
			switch out := c.String("output"); out {
			case "json":
				return printJSON(c.App.Writer, rows)
			case "table":
				return printConnections(c.App.Writer, rows)
			default:
				return usageError("output %q is not one of table, json", out)
			}
		},
	}
}

func printConnections(w io.Writer, rows []plan.ConnectionStatus) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "PROTO\tCLIENT\tSERVICE\tADDRESS\tENDPOINT\tDATA PLANE\tAGE\tBYTES IN\tBYTES OUT")
	for _, r := range rows {
		age := "-" // the kernel doesn't tell when its flows began
		if r.AgeSeconds > 0 {
			age = time.Duration(r.AgeSeconds * float64(time.Second)).Round(time.Second / 10).String()
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\n", r.Protocol, r.Client, r.Service, r.Address, r.Endpoint, r.DataPlane, age, r.BytesIn, r.BytesOut)
	}
	return t.Flush()
}
