package leftovers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// lookSets lists kube-proxy's ipsets. Where there is no program ipset, there was
// none for kube-proxy either.
func lookSets(ctx context.Context, run kernel.Runner) (out []string, err error) {
	text, err := run.Run(ctx, nil, "ipset", "list", "-n")
	if errors.Is(err, kernel.ErrNoProgram) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list ipsets: %w", err)
	}
	for name := range strings.FieldsSeq(string(text)) {
		if baseOf(name) != "" {
			out = append(out, name)
		}
	}
	return out, nil
}

// namedBy are the addresses and node ports in kube-proxy's sets, the unspecified
// address standing for the node's own; and what kproxy's own sets name.
func namedBy(ctx context.Context, run kernel.Runner, sets []string) (theirs, kproxys map[server]bool, err error) {
	theirs, kproxys = map[server]bool{}, map[server]bool{}
	for _, name := range sets {
		switch base := baseOf(name); {
		case strings.HasPrefix(base, "NODE-PORT-"), base == "CLUSTER-IP", strings.HasPrefix(base, "EXTERNAL-IP"), base == "LOAD-BALANCER", base == "LOAD-BALANCER-LOCAL":
			if err := readSet(ctx, run, name, theirs); err != nil {
				return nil, nil, err
			}
		}
	}
	for _, f := range service.Families {
		if err := readSet(ctx, run, kernel.FamilySet(kernel.SetVirtual, f), kproxys); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return nil, nil, err
		}
	}
	return theirs, kproxys, nil
}

// readSet adds a set's entries: "10.96.0.10,tcp:53", or "30080" in the sets of
// node ports, whose names tell the protocol.
func readSet(ctx context.Context, run kernel.Runner, name string, into map[server]bool) error {
	text, err := run.Run(ctx, nil, "ipset", "save", name)
	if err != nil {
		return fmt.Errorf("read ipset %s: %w", name, err)
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 3 || words[0] != "add" {
			continue
		}
		address, port, ok := strings.Cut(words[2], ",")
		at := anywhere(service.IPv4)
		if strings.HasPrefix(name, "KUBE-6-") {
			at = anywhere(service.IPv6)
		}
		proto := name[strings.LastIndex(name, "-")+1:]
		if ok {
			at, err = netip.ParseAddr(address)
			proto, port, _ = strings.Cut(port, ":")
		} else {
			port = address
		}
		number, portErr := strconv.ParseUint(port, 10, 16)
		p, protoErr := service.ParseProtocol(proto)
		if err := errors.Join(err, portErr, protoErr); err != nil {
			return fmt.Errorf("read ipset %s: entry %s: %w", name, words[2], err)
		}
		into[server{uint16(p), netip.AddrPortFrom(at, uint16(number))}] = true
	}
	return nil
}

// setWait bounds the wait for references of deleted rules to go, which the nft
// variant frees a moment later.
const setWait = 2 * time.Second

func removeSets(ctx context.Context, run kernel.Runner, names []string) error {
	var errs *multierror.Error
	deadline := time.Now().Add(setWait)
	for _, name := range names {
		_, err := run.Run(ctx, nil, "ipset", "destroy", name)
		for err != nil && !errors.Is(err, kernel.ErrNotFound) && time.Now().Before(deadline) && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
			_, err = run.Run(ctx, nil, "ipset", "destroy", name)
		}
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("remove ipset %s: %w", name, err))
		}
	}
	return errs.ErrorOrNil()
}
