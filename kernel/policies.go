package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// policyChain is where kube-router, which k3s and k0s have too, filters what the node sends to its
// pods by network policies.
const policyChain = "KUBE-ROUTER-OUTPUT"

// SentIsFiltered reports whether kube-router's network policies filter what the node of the calling
// thread sends to pods. They go by the source that a packet has in OUTPUT, where one that is rewritten later
// has no address that they know.
func SentIsFiltered(ctx context.Context) (found bool, err error) {
	err = nlmsg.DumpNFTables(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil, func(_ uint8, b []byte) {
		for kind, value := range nlmsg.Attributes(b) {
			found = found || kind == unix.NFTA_CHAIN_NAME && nlmsg.Text(value) == policyChain
		}
	})
	names, _ := os.ReadFile("/proc/thread-self/net/ip_tables_names") // of the legacy variant; none without it
	if err != nil || found || !slices.Contains(strings.Fields(string(names)), "filter") {
		return found, err
	}
	out, err := Exec{}.Run(ctx, nil, VariantLegacy().Program[service.IPv4], "-w", "5", "-S")
	switch {
	case errors.Is(err, ErrNoProgram):
		return true, nil // it can't be known, and what follows from true always works
	case err != nil:
		return false, fmt.Errorf("look for network policies: %w", err)
	}
	return strings.Contains(string(out), "-N "+policyChain+"\n"), nil
}
