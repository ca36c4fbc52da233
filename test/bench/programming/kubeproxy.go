package programming

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// built returns the folder of what test/kube/setup.sh builds with these arguments.
func built(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "test/kube/setup.sh", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build programs of Kubernetes, in the repository's root: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
