package agent

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// networks is what decisions depend on of the host's links and addresses. It is
// looked up apart from plans: where every service has its address on kproxy's
// own link, a list of addresses takes longer than a plan does. Safe for
// concurrent use.
type networks struct {
	now atomic.Pointer[networkState]
}

// networkState is never modified.
type networkState struct {
	links     []netip.Prefix // whose hosts answer each other without passing this node
	bridged   []netip.Prefix // whose hosts' answers to each other pass its netfilter only
	addresses []netip.Addr   // the node's own, sorted
}

// look finds out how things are and reports whether that is news. What can't be
// listed is taken to be as it was; at start there is nothing to go by, and the
// error matters.
func (n *networks) look(log *slog.Logger) (news bool, err error) {
	last := n.now.Load()
	var was networkState
	if last != nil {
		was = *last
	}
	now := was
	links, bridged, linksErr := kernel.Links()
	if linksErr == nil {
		now.links, now.bridged = links, bridged
	}
	addresses, addressesErr := kernel.NodeAddresses()
	if addressesErr == nil {
		now.addresses = addresses
	}
	if err = errors.Join(linksErr, addressesErr); err != nil {
		log.Warn("this node's networks and addresses can't be listed", "error", err)
	}
	if slices.Equal(was.links, now.links) && slices.Equal(was.bridged, now.bridged) && slices.Equal(was.addresses, now.addresses) {
		return false, err
	}
	n.now.Store(&now)
	if last != nil {
		log.Info("the networks of this node have changed", "networks", now.links, "bridged", now.bridged, "addresses", now.addresses)
	}
	return true, err
}

// get returns how things were when they were last looked at.
func (n *networks) get() networkState {
	if s := n.now.Load(); s != nil {
		return *s
	}
	return networkState{}
}

// policyNow is the policy with the host's networks as they were last seen.
func (a *Agent) policyNow() plan.Policy {
	p, n := a.policy, a.networks.get()
	p.Links, p.BridgedLinks, p.NodeAddresses = n.links, n.bridged, n.addresses
	return p
}

// tellDetector logs how pods are told from other clients, when that changes.
func (a *Agent) tellDetector(old, p *plan.Plan) {
	if old != nil && old.Policy.SameDetector(&p.Policy) {
		return
	}
	if d := p.Policy.Detector(); d.Supported {
		a.log.Info(d.Name, "pods", d.Reason)
	} else {
		a.log.Warn("no "+d.Name, "reason", d.Reason)
	}
}
