package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/plan"
)

// rowsAtMost is how many connections are printed unless --limit says otherwise.
const rowsAtMost = 1000

func connectionsCommand() *cli.Command {
	return &cli.Command{
		Name:      "connections",
		Usage:     "list live connections in every data plane",
		ArgsUsage: "[" + targetUsage + "]",
		Flags: []cli.Flag{
			socketFlag(), outputFlag("table", "wide", "json", "yaml"),
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "follow them: on a terminal as a screen with keys, else printed every second"},
			choiceFlag(&cli.StringFlag{Name: "sort", Value: screen.ConnectionOrders[0], Usage: "`ORDER`: " + strings.Join(screen.ConnectionOrders, ", ")}, screen.ConnectionOrders...),
			&cli.IntFlag{Name: "limit", Value: rowsAtMost, Usage: "print at most `N` connections; 0 for all. JSON and YAML have all unless this is given"},
		},
		Action: showConnections,
	}
}

// connectionsShown holds what the flags of `kproxy connections` ask for, and the terminal's width.
type connectionsShown struct {
	format string
	sort   string
	limit  int // 0 for none
	width  int // of the terminal; 0 where there is none
}

func showConnections(c *cli.Context) error {
	which, err := oneTarget(c)
	if err != nil {
		return err
	}
	f := connectionsShown{format: c.String("output"), sort: c.String("sort"), limit: c.Int("limit")}
	switch {
	case f.limit < 0:
		return usageError("limit %d is less than 0", f.limit)
	case isForPrograms(f.format) && !c.IsSet("limit"):
		f.limit = 0
	}
	out := c.App.Writer
	f.width = terminalWidth(out)
	client := clientOf(c)
	list := func(ctx context.Context) ([]plan.ConnectionStatus, error) { return which.connections(ctx, client) }
	rows, err := list(c.Context)
	switch {
	case err != nil:
		return err
	case len(rows) == 0 && c.NArg() > 0 && !c.Bool("watch"):
		if _, err := which.lookUp(c.Context, client); err != nil { // it may be misspelt
			return err
		}
		return f.print(out, rows)
	case !c.Bool("watch"):
		return f.print(out, rows)
	case isForPrograms(f.format) || !canDraw(out):
		return watchPlainly(c.Context, out, list, f.print)
	}
	model := screen.NewConnections(screen.ThemeOf(os.Getenv), f.format == "wide", f.sort)
	model.Update(rows, time.Now())
	return watchOnScreen(c.Context, model, list)
}

// print prints the rows that the limit allows, and says what it cut.
func (f *connectionsShown) print(w io.Writer, rows []plan.ConnectionStatus) error {
	screen.SortConnections(rows, f.sort)
	shown := rows
	if f.limit > 0 && len(rows) > f.limit {
		shown = rows[:f.limit]
	}
	if isForPrograms(f.format) {
		return printValue(w, f.format, shown)
	}
	lines := screen.ConnectionTable(shown, f.format == "wide", f.width, screen.Theme{Unicode: screen.ThemeOf(os.Getenv).Unicode})
	lines = append(lines, "", screen.ConnectionSummary(rows))
	if len(shown) < len(rows) {
		lines = append(lines, fmt.Sprintf("the first %d of them are listed (--limit), sorted by %s", len(shown), f.sort))
	}
	_, err := io.WriteString(w, strings.Join(lines, "\n")+"\n")
	return err
}
