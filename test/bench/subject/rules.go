package subject

import (
	"context"
	"fmt"
	"strings"
)

// rule adds a rule to the node's nat table.
func (r *Rig) rule(ctx context.Context, rule string) error {
	r.rules = true
	args := append([]string{"-w", "-t", "nat"}, strings.Fields(rule)...)
	if out, err := r.net.Node.Command(ctx, "iptables", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("iptables %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func startDNAT(ctx context.Context, r *Rig) error {
	for _, protocol := range []string{"tcp", "udp"} {
		if err := r.rule(ctx, fmt.Sprintf("-A PREROUTING -d %s -p %s -m multiport --dports 9201:9299 -j DNAT --to-destination %s", r.node(), protocol, r.serverAddress())); err != nil {
			return err
		}
	}
	return nil
}

// redirected leads a service's address to a proxy, as kproxy's rules do to it.
func redirected(start func(context.Context, *Rig) error) func(context.Context, *Rig) error {
	return func(ctx context.Context, r *Rig) error {
		for _, protocol := range []string{"tcp", "udp"} {
			if err := r.rule(ctx, fmt.Sprintf("-A PREROUTING -d %s -p %s -m multiport --dports 9201:9299 -j REDIRECT", ServiceAddress, protocol)); err != nil {
				return err
			}
		}
		return start(ctx, r)
	}
}
