package node

import (
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// PolicyOf returns the part of the configuration that decisions depend on.
func PolicyOf(c config.Config) plan.Policy {
	p := plan.DefaultPolicy()
	p.Mode = plan.Mode(c.Mode)
	p.OffloadAfter = c.OffloadAfter
	p.OffloadMinConnections = uint64(c.OffloadMinConnections)
	p.MasqueradeAll = c.MasqueradeAll
	switch c.DetectLocalMode {
	case "NodeCIDR":
		p.NodePodCIDRs = true
	case "BridgeInterface":
		p.PodBridge = c.PodBridge
	case "InterfaceNamePrefix":
		p.PodInterfacePrefix = c.PodInterfacePrefix
	default: // ClusterCIDR
		p.PodCIDRs = c.PodNetworks()
	}
	p.NodePortNetworks, p.PrimaryNodePorts = c.NodePortNetworks()
	p.NoLocalhostNodePorts = !c.LocalhostNodePorts
	p.ExcludeCIDRs = c.ExcludedNetworks()
	p.CloseClusterIPs, p.ServiceCIDRs = c.CloseClusterIPs, c.ServiceNetworks()
	return p
}

// Networks holds what decisions depend on of the host's links and addresses. They
// are looked up apart from plans: where every service has its address on kproxy's
// own link, listing the addresses takes longer than making a plan. Safe for
// concurrent use, but for Read, which one goroutine at a time calls.
type Networks struct {
	Host   kernel.Facts
	events kernel.RouteEvents
	calls  [2]bool // BridgeCallsNetfilter when they were read
	blind  bool    // it was said that filters can't be read
	now    atomic.Pointer[networkState]
}

// networkState is never modified.
type networkState struct {
	kernel.Networks
	filtered bool // what the node sends to hosts of Bridged is, by network policies
}

// Read lists them, if the kernel tells of changes, and reports whether anything has changed. What can't be
// listed is taken to be as it was; at start there is nothing to go by, and the
// error matters.
func (n *Networks) Read(log *slog.Logger) (changed bool, err error) {
	last := n.now.Load()
	var was networkState
	if last != nil {
		was = *last
	}
	now := was
	if calls := [2]bool{kernel.BridgeCallsNetfilter(service.IPv4), kernel.BridgeCallsNetfilter(service.IPv6)}; calls != n.calls {
		n.calls = calls
		n.events.Again()
	}
	err = n.events.Look(func() error {
		found, err := kernel.ReadNetworks()
		if err == nil {
			now.Networks = found
		}
		return err
	})
	var filterErr error
	if len(now.Bridged) > 0 {
		var filtered bool
		if filtered, filterErr = kernel.SentIsFiltered(); filterErr == nil {
			now.filtered = filtered
		} else if last == nil {
			now.filtered = true // what always works
		}
	}
	if filterErr != nil && !errors.Is(filterErr, unix.EAGAIN) && !n.blind {
		n.blind = true
		log.Warn("it can't be known what filters packets that the node sends", "error", filterErr)
	}
	if err != nil {
		log.Warn("this node's networks and addresses can't be listed", "error", err)
	}
	if now.filtered != was.filtered && now.filtered {
		log.Info("network policies of kube-router filter what the node sends: while a service is in userspace, its endpoints see the node's address of clients on their own bridge")
	}
	if now.filtered == was.filtered && slices.Equal(was.Links, now.Links) && slices.Equal(was.Bridged, now.Bridged) && slices.Equal(was.Addresses, now.Addresses) {
		return false, err
	}
	n.now.Store(&now)
	if last != nil {
		log.Info("the networks of this node have changed", "networks", now.Links, "bridged", now.Bridged, "addresses", now.Addresses)
	}
	return true, err
}

// Fill puts how things were when they were last looked at into p.
func (n *Networks) Fill(p *plan.Policy) {
	s := n.now.Load()
	if s == nil {
		return
	}
	p.Links, p.BridgedLinks, p.NodeAddresses = s.Links, s.Bridged, s.Addresses
	p.NoStandIns = s.filtered || n.Host.WithoutNetmap
}
