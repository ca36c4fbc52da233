package kernel

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// policyChain is where kube-router, which k3s and k0s have too, filters what the node sends to its
// pods by network policies.
const policyChain = "KUBE-ROUTER-OUTPUT"

// SentIsFiltered reports whether kube-router's network policies filter what the node of the calling
// thread sends to pods, by either variant of iptables. They go by the source that a packet has in OUTPUT, where
// one that is rewritten later has no address that they know.
func SentIsFiltered() (found bool, err error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 1<<12)
	if err != nil {
		return false, err
	}
	defer s.Close()
	var errs []error
	err = s.Do(len(service.Families), func(b []byte, i int) []byte {
		b = netlink.AppendNetfilter(netlink.AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, 0), service.Families[i].Number())
		return netlink.AppendText(netlink.AppendText(b, unix.NFTA_CHAIN_TABLE, "filter"), unix.NFTA_CHAIN_NAME, policyChain)
	}, func(_ int, body []byte, err error) {
		found = found || err == nil && body != nil
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) { // a kernel without nf_tables
			errs = append(errs, err)
		}
	})
	for _, f := range service.Families {
		legacy, errLegacy := ReadLegacyFilter(f)
		found = found || legacy != nil && bytes.Contains(legacy.Rules, []byte(policyChain+"\x00"))
		errs = append(errs, errLegacy)
	}
	if err = errors.Join(append(errs, err)...); err != nil && !found {
		return false, fmt.Errorf("look for kube-router's network policies: %w", err)
	}
	return found, nil
}
