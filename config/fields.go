package config

import "slices"

// Field is a field of KubeProxyConfiguration and what kproxy makes of it: it
// sets a part of [Config], or it is ignored for a reason.
type Field struct {
	Path    string // as written in the file: "iptables.masqueradeBit"
	Sets    string // the part of Config, by its names in JSON: "ipvs.strictARP"
	Note    string // how kproxy understands the field, where that isn't plain
	Ignored string // why it has no effect; then Sets is empty
	// Only is the mode of the file that the field has an effect in; with "!" in
	// front, all but that one.
	Only string
}

// Reasons that several fields are ignored for.
const (
	whenChanged  = "kproxy programs changes at once and watches its rules: there is no period"
	noGates      = "kproxy has none of kube-proxy's optional features to turn on or off"
	onWindows    = "for Windows; kproxy runs on Linux"
	unbuffered   = "kproxy writes its log unbuffered, to standard error"
	levelForAll  = "kproxy's log has one level for all of it; use --v"
	watchesOnly  = "kproxy watches the Kubernetes API and doesn't list it again from time to time"
	bindFatal    = "kproxy never runs without an address it was told to serve on: it says so and exits before it programs anything"
	ownOnly      = "kproxy removes only virtual servers it made itself, so there are none to except"
	currentOnly  = "kproxy has no hidden metrics"
	noPortRange  = "kproxy, as kube-proxy, opens no ports of a range"
	sameAsWanted = "kproxy accepts what it asks for, which is clientConnection.contentType"
)

const localhostNote = "unless given, true where mode is iptables or empty, false where it is ipvs or nftables, in which kube-proxy doesn't serve them; " +
	"kproxy can in all modes and for ::1, always in userspace, without route_localnet"

// Flag returns the flag of `kproxy run` that sets the same as the field, and wins.
func (f Field) Flag() string { return FlagOf(f.Sets) }

// Fields is every field of KubeProxyConfiguration v1alpha1, in its order.
func Fields() []Field { return slices.Clone(fields) }

var fields = []Field{
	{Path: "featureGates", Ignored: noGates},
	{Path: "clientConnection.kubeconfig", Sets: "kubeconfig", Note: "--manifests, if given, takes its place; empty means the cluster this pod runs in"},
	{Path: "clientConnection.acceptContentTypes", Ignored: sameAsWanted},
	{Path: "clientConnection.contentType", Sets: "clientConnection.contentType"},
	{Path: "clientConnection.qps", Sets: "clientConnection.qps"},
	{Path: "clientConnection.burst", Sets: "clientConnection.burst"},
	{Path: "logging.format", Sets: "logFormat"},
	{Path: "logging.flushFrequency", Ignored: unbuffered},
	{Path: "logging.verbosity", Sets: "v", Note: "from 4 on everything is logged; below, all but the details"},
	{Path: "logging.vmodule", Ignored: levelForAll},
	{Path: "logging.options.text.splitStream", Ignored: unbuffered},
	{Path: "logging.options.text.infoBufferSize", Ignored: unbuffered},
	{Path: "logging.options.json.splitStream", Ignored: unbuffered},
	{Path: "logging.options.json.infoBufferSize", Ignored: unbuffered},
	{Path: "hostnameOverride", Sets: "hostnameOverride"},
	{Path: "bindAddress", Sets: "nodeIP", Note: "0.0.0.0 and :: leave the node's address to its Node object; an IPv6 one moves the defaults of the two addresses below to IPv6"},
	{Path: "healthzBindAddress", Sets: "healthzBindAddress", Note: "an IP alone gets port 10256"},
	{Path: "metricsBindAddress", Sets: "metricsBindAddress", Note: "an IP alone gets port 10249"},
	{Path: "bindAddressHardFail", Ignored: bindFatal},
	{Path: "enableProfiling", Sets: "enableProfiling"},
	{Path: "showHiddenMetricsForVersion", Ignored: currentOnly},
	{Path: "mode", Sets: "mode", Note: "iptables, ipvs and nftables are the furthest a service may go; empty leaves the choice to kproxy, which is auto; " +
		"kproxy's own auto and userspace are understood"},
	{Path: "iptables.masqueradeBit", Sets: "iptablesMasqueradeBit", Only: "!nftables"},
	{Path: "iptables.masqueradeAll", Sets: "masqueradeAll", Only: "!nftables"},
	{Path: "iptables.localhostNodePorts", Sets: "localhostNodePorts", Note: localhostNote},
	{Path: "iptables.syncPeriod", Ignored: whenChanged},
	{Path: "iptables.minSyncPeriod", Ignored: whenChanged},
	{Path: "ipvs.syncPeriod", Ignored: whenChanged},
	{Path: "ipvs.minSyncPeriod", Ignored: whenChanged},
	{Path: "ipvs.scheduler", Sets: "ipvs.scheduler"},
	{Path: "ipvs.excludeCIDRs", Ignored: ownOnly},
	{Path: "ipvs.strictARP", Sets: "ipvs.strictARP"},
	{Path: "ipvs.tcpTimeout", Sets: "ipvs.tcpTimeout", Note: "0s leaves the kernel's setting where mode is ipvs; in other modes it is as long as conntrack's, " +
		"so that an idle connection that IPVS carries lives as long as it did without IPVS"},
	{Path: "ipvs.tcpFinTimeout", Sets: "ipvs.tcpFinTimeout"},
	{Path: "ipvs.udpTimeout", Sets: "ipvs.udpTimeout"},
	{Path: "nftables.masqueradeBit", Sets: "iptablesMasqueradeBit", Only: "nftables"},
	{Path: "nftables.masqueradeAll", Sets: "masqueradeAll", Only: "nftables"},
	{Path: "nftables.syncPeriod", Ignored: whenChanged},
	{Path: "nftables.minSyncPeriod", Ignored: whenChanged},
	{Path: "winkernel.networkName", Ignored: onWindows},
	{Path: "winkernel.sourceVip", Ignored: onWindows},
	{Path: "winkernel.enableDSR", Ignored: onWindows},
	{Path: "winkernel.rootHnsEndpointName", Ignored: onWindows},
	{Path: "winkernel.forwardHealthCheckVip", Ignored: onWindows},
	{Path: "detectLocalMode", Sets: "detectLocalMode"},
	{Path: "detectLocal.bridgeInterface", Sets: "podBridgeInterface"},
	{Path: "detectLocal.interfaceNamePrefix", Sets: "podInterfaceNamePrefix"},
	{Path: "clusterCIDR", Sets: "clusterCIDR"},
	{Path: "nodePortAddresses", Sets: "nodePortAddresses", Note: "unless given, every address of the node, where mode is nftables its primary ones"},
	{Path: "oomScoreAdj", Sets: "oomScoreAdj"},
	{Path: "conntrack.maxPerCore", Sets: "conntrack.maxPerCore"},
	{Path: "conntrack.min", Sets: "conntrack.min"},
	{Path: "conntrack.tcpEstablishedTimeout", Sets: "conntrack.tcpEstablishedTimeout"},
	{Path: "conntrack.tcpCloseWaitTimeout", Sets: "conntrack.tcpCloseWaitTimeout"},
	{Path: "conntrack.tcpBeLiberal", Sets: "conntrack.tcpBeLiberal"},
	{Path: "conntrack.udpTimeout", Sets: "conntrack.udpTimeout"},
	{Path: "conntrack.udpStreamTimeout", Sets: "conntrack.udpStreamTimeout"},
	{Path: "configSyncPeriod", Ignored: watchesOnly},
	{Path: "portRange", Ignored: noPortRange},
	{Path: "windowsRunAsService", Ignored: onWindows},
}

// former are fields that v1alpha1 once had. Files that a cluster has carried
// along since then still hold them, and kube-proxy only warns.
var former = []Field{
	{Path: "udpIdleTimeout", Ignored: "kube-proxy did away with it, with its userspace mode; a Service's annotation kproxy.dev/idle-timeout is kproxy's"},
	{Path: "resourceContainer", Ignored: "kube-proxy did away with it; its supervisor says which control group kproxy runs in"},
	{Path: "conntrack.max", Ignored: "kube-proxy did away with it; use conntrack.maxPerCore and conntrack.min"},
}
