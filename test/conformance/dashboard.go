package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"time"

	kproxies "kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// pluginUI opens the dashboard as a viewer, who sees all nodes, and as a user who may not connect to kproxy's pods.
func (c *cluster) pluginUI(ctx context.Context) error {
	all, none := map[string]kproxies.State{}, map[string]kproxies.State{}
	for _, n := range c.nodes {
		all[n.name], none[n.name] = "alive", kproxies.Forbidden
	}
	return errors.Join(c.dashboard(ctx, "viewer", all), c.dashboard(ctx, "lister", none))
}

// pluginUIAbsent opens the dashboard while a node has no kproxy.
func (c *cluster) pluginUIAbsent(ctx context.Context) error {
	want := map[string]kproxies.State{}
	for _, n := range c.nodes {
		want[n.name] = "alive"
	}
	want[c.nodes[2].name] = kproxies.Absent
	return c.dashboard(ctx, "viewer", want)
}

// dashboard runs `kubectl kproxy ui` as a user until it has each node in a state, and the cells that go with them.
func (c *cluster) dashboard(ctx context.Context, user string, want map[string]kproxies.State) (err error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	cmd := exec.CommandContext(ctx, "env", c.pluginArgs(user, "ui", "--address", "127.0.0.1:0", "--timeout", "5s")...)
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start kubectl kproxy ui: %w", err)
	}
	defer func() {
		end()
		_ = cmd.Wait() // killed
		if err != nil {
			err = fmt.Errorf("kubectl kproxy ui as %s: %w: %s", user, err, strings.TrimSpace(complaint.String()))
		}
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("read its address: %w", err)
	}
	_, address, _ := strings.Cut(line, "http://")
	address, _, _ = strings.Cut(address, "/")
	page, err := fetch(ctx, "http://"+address+"/")
	if err != nil || !strings.Contains(string(page), "<title>kproxy on all nodes</title>") {
		return fmt.Errorf("its page is another: %w: %.200s", err, page)
	}
	return poll(ctx, 2*time.Minute, func() error { return dashboardHas(ctx, "http://"+address+"/api/v1/", want) })
}

// dashboardHas reads what the page reads, and compares nodes and the cells of a service port.
func dashboardHas(ctx context.Context, api string, want map[string]kproxies.State) error {
	var list kproxies.NodeList
	if err := fetchInto(ctx, api+"nodes", &list); err != nil {
		return err
	}
	answer := 0
	for _, n := range list.Rows {
		if n.State != want[n.Node] {
			return fmt.Errorf("node %s is %q (%s), want %q", n.Node, n.State, n.Error, want[n.Node])
		}
		if n.Answering {
			answer++
		}
	}
	if len(list.Rows) != len(want) {
		return fmt.Errorf("%d nodes are listed, want %d", len(list.Rows), len(want))
	}
	var grid kproxies.Grid
	if err := fetchInto(ctx, api+"grid?q=default/server/tcp", &grid); err != nil {
		return err
	}
	rows := min(answer, 1) // of no service port anything is known where no node has said anything
	if grid.Rows != rows || len(grid.Nodes) != len(want) || len(grid.Cells) != 3*rows*len(want) {
		return fmt.Errorf("the heat map has %d rows of nodes %v, want %d of %d", grid.Rows, grid.Nodes, rows, len(want))
	}
	for i, cell := range slices.Collect(slices.Chunk(grid.Cells, 3)) {
		class, of := plan.Fine, want[grid.Nodes[i]]
		if of != "alive" {
			class = kproxies.Unknown
		}
		if got := grid.Classes[cell[0]]; got != class || of == "alive" && cell[1] == 0 {
			return fmt.Errorf("the service's cell of node %s is %q in data plane %d, want %q", grid.Nodes[i], got, cell[1], class)
		}
	}
	return nil
}

func fetchInto(ctx context.Context, url string, into any) error {
	text, err := fetch(ctx, url)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	return err
}

// fetch gets what is at a URL of this network.
func fetch(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return lab.Get(ctx, http.DefaultClient, url)
}
