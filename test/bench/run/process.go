package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"kproxy.dev/kproxy/test/bench/proxies"
	"kproxy.dev/kproxy/test/bench/subject"
	"kproxy.dev/kproxy/test/bench/traffic"
)

// process is one of the benchmark's other programs, which it runs itself as.
func process(ctx context.Context, args []string) error {
	ready := func() { fmt.Println(subject.Ready) }
	arg := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	switch args[0] {
	case "serve":
		return traffic.Serve(ctx, ready)
	case "load":
		return runLoad(arg(1))
	case "hold":
		to, err := netip.ParseAddrPort(arg(1))
		n, err2 := strconv.Atoi(arg(2))
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		return traffic.Hold(ctx, to, n, ready)
	case "copy", "engine":
		var c proxies.Config
		if err := json.Unmarshal([]byte(arg(1)), &c); err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		if args[0] == "copy" {
			return proxies.Copy(ctx, c, ready)
		}
		return proxies.Engine(ctx, c, ready)
	}
	return fmt.Errorf("%q is neither a flag nor a program of the benchmark", args[0])
}

func runLoad(arg string) error {
	var l traffic.Load
	if err := json.Unmarshal([]byte(arg), &l); err != nil {
		return fmt.Errorf("read load: %w", err)
	}
	out, err := traffic.Run(l)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}
