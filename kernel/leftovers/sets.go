package leftovers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/kernel"
)

// findSets lists kube-proxy's ipsets. Where there is no program ipset, there was
// none for kube-proxy either.
func findSets(ctx context.Context, run kernel.Runner) (out []string, err error) {
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
