package config

import (
	"time"

	"kproxy.dev/kproxy/service"
)

// Config is everything `kproxy run` goes by. The tag flag of a field names the flag
// that sets it; the text form is kept so that Validate can report every problem.
type Config struct {
	Mode       string   `json:"mode" flag:"mode"`             // one of Modes: the furthest data plane
	Manifests  []string `json:"manifests" flag:"manifests"`   // files and directories, watched
	Kubeconfig string   `json:"kubeconfig" flag:"kubeconfig"` // path; the Kubernetes API as a source
	Master     string   `json:"master" flag:"master"`         // URL of the Kubernetes API; wins over Kubeconfig's
	InCluster  bool     `json:"inCluster"`                    // the Kubernetes API as pods of the cluster reach it; no flag
	File       string   `json:"config"`                       // path of a KubeProxyConfiguration (--config)
	Client     Client   `json:"clientConnection"`

	HostnameOverride    string   `json:"hostnameOverride" flag:"hostname-override"`      // this node's name; empty means the host name
	NodeIPs             []string `json:"nodeIP" flag:"node-ip"`                          // this node's address, one per family; empty means its Node object's
	ClusterCIDRs        []string `json:"clusterCIDR" flag:"cluster-cidr"`                // the pods' networks, one per family
	ExcludeClusterCIDRs []string `json:"excludeClusterCIDR" flag:"exclude-cluster-cidr"` // networks of pods another proxy serves
	ServiceCIDRs        []string `json:"serviceCIDR" flag:"service-cidr"`                // networks of cluster IPs, besides those that the API names
	DetectLocalMode     string   `json:"detectLocalMode" flag:"detect-local-mode"`       // one of DetectLocalModes; empty means ClusterCIDR
	// PodBridge is the interface of this node that pods are bridged to
	// (BridgeInterface), PodInterfacePrefix what the names of the pods' own begin
	// with (InterfaceNamePrefix).
	PodBridge          string `json:"podBridgeInterface" flag:"pod-bridge-interface"`
	PodInterfacePrefix string `json:"podInterfaceNamePrefix" flag:"pod-interface-name-prefix"`
	// NodePortAddresses are networks, or words that stand for some (AllAddresses,
	// LocalhostAddresses, PrimaryAddresses): node ports answer on those of the
	// node's addresses that are in one; empty means on all.
	NodePortAddresses  []string `json:"nodePortAddresses" flag:"nodeport-addresses"`
	LocalhostNodePorts bool     `json:"localhostNodePorts" flag:"iptables-localhost-nodeports"` // node ports answer on 127.0.0.1 too
	// CloseClusterIPs: what is to a cluster IP by a port that no Service has there is refused, and to an address of the
	// cluster's networks of cluster IPs that no Service has, dropped.
	CloseClusterIPs bool `json:"closeClusterIPs" flag:"close-cluster-ips"`
	MasqueradeAll   bool `json:"masqueradeAll" flag:"masquerade-all"`                  // every connection leaves with the node's address
	MasqueradeBit   int  `json:"iptablesMasqueradeBit" flag:"iptables-masquerade-bit"` // of the packet mark, 0-31
	TransparentBit  int  `json:"transparentBit" flag:"transparent-bit"`                // of the packet mark, 1-31; the bit below is used too
	RouteTable      int  `json:"routeTable" flag:"route-table"`                        // for replies to transparent sockets

	OffloadAfter          time.Duration `json:"offloadAfter" flag:"offload-after"`                    // steady this long before offload; 0 at once
	OffloadMinConnections int           `json:"offloadMinConnections" flag:"offload-min-connections"` // carried this many before offload
	AliveTimeout          time.Duration `json:"aliveTimeout" flag:"alive-timeout"`                    // whole seconds, as ipset counts them
	DrainTimeout          time.Duration `json:"drainTimeout" flag:"drain-timeout"`                    // 0 doesn't drain

	Conntrack Conntrack `json:"conntrack"`

	Health Health `json:"health"`
	// PassiveHealth ejects endpoints that clients find silent, and that answer no probe for that reason. ResetDeadConnections
	// resets connections to endpoints that have left their API and whose hosts are silent. HealthzIsolated: /healthz fails
	// while most other nodes are silent to this one.
	PassiveHealth        bool     `json:"passiveHealth" flag:"passive-health"`
	ResetDeadConnections bool     `json:"resetDeadConnections" flag:"reset-dead-connections"`
	HealthzIsolated      bool     `json:"healthzIsolated" flag:"healthz-isolated"`
	IPVS                 IPVS     `json:"ipvs"`
	NFTables             NFTables `json:"nftables"`

	MetricsBindAddress string        `json:"metricsBindAddress" flag:"metrics-bind-address"` // ip:port; empty serves none
	HealthzBindAddress string        `json:"healthzBindAddress" flag:"healthz-bind-address"` // ip:port; empty serves none
	Socket             string        `json:"socket" flag:"socket"`                           // path of the control socket
	StateDir           string        `json:"stateDir" flag:"state-dir"`                      // what must survive a restart: pins, the last state of the Kubernetes API
	StateMaxAge        time.Duration `json:"stateMaxAge" flag:"state-max-age"`               // of that state, to be served; 0 keeps none
	ListenTCPPort      int           `json:"listenTCPPort" flag:"listen-tcp-port"`           // of the shared listener; 0 lets the kernel choose
	ListenUDPPort      int           `json:"listenUDPPort" flag:"listen-udp-port"`           // of the shared listener; 0 lets the kernel choose

	// So many service ports, and endpoints of theirs, have series of their own in
	// /metrics; the others share one.
	MetricsServices  int `json:"metricsServiceLimit" flag:"metrics-service-limit"`
	MetricsEndpoints int `json:"metricsEndpointLimit" flag:"metrics-endpoint-limit"`

	GrafanaURL string `json:"grafanaURL" flag:"grafana-url"` // that has deploy/monitoring's dashboard, which pages link to; empty for none

	Profiling bool `json:"enableProfiling" flag:"profiling"` // /debug/pprof on MetricsBindAddress
	Supervise bool `json:"supervise" flag:"supervise"`       // another process does the work, and a next one goes on should it crash
	// OOMScoreAdj is this process's oom_score_adj, -1000 to 1000 (proc(5)); nil
	// leaves it as it is.
	OOMScoreAdj *int `json:"oomScoreAdj" flag:"oom-score-adj"`

	LogFormat string `json:"logFormat" flag:"log-format"` // one of LogFormats
	Verbosity string `json:"v" flag:"v"`                  // a log level's name, or kube-proxy's number
}

// Client says how kproxy talks to the Kubernetes API (flags --kube-api-*).
type Client struct {
	QPS         float64 `json:"qps" flag:"kube-api-qps"`                  // requests a second; negative doesn't limit them
	Burst       int     `json:"burst" flag:"kube-api-burst"`              // so many more at a time
	ContentType string  `json:"contentType" flag:"kube-api-content-type"` // that objects are asked for in
}

// Health is the active check of endpoints whose Service doesn't say otherwise
// (flags --health-*).
type Health struct {
	// Check is empty for the default, which depends on the source: tcp for
	// manifests, off for Kubernetes, where the kubelet probes already.
	Check    service.Check `json:"check" flag:"health-check"`
	Interval time.Duration `json:"interval" flag:"health-interval"`
	Timeout  time.Duration `json:"timeout" flag:"health-timeout"`
	Rise     int           `json:"rise" flag:"health-rise"` // successes in a row that make an endpoint up
	Fall     int           `json:"fall" flag:"health-fall"` // failures in a row that make it down
	// Annotations of Services may ask for checks, and for no shorter an interval
	// than MinInterval or, if that is less, Interval.
	Annotations bool          `json:"annotations" flag:"health-annotations"`
	MinInterval time.Duration `json:"minInterval" flag:"health-min-interval"`
	MaxRate     int           `json:"maxRate" flag:"health-max-rate"` // probes a second, of all endpoints
}

// IPVS holds what only the data plane ipvs goes by (flags --ipvs-*).
type IPVS struct {
	// Scheduler is for Services that ask for none, nor for an algorithm; empty for
	// that of the default algorithm.
	Scheduler string `json:"scheduler" flag:"ipvs-scheduler"`
	// StrictARP: the node answers ARP for addresses of the asked link only.
	StrictARP bool `json:"strictARP" flag:"ipvs-strict-arp"`
	// TCPTimeout is after how long an idle connection is forgotten: whole seconds
	// ("15m"); LikeConntrack for conntrack's own, so that an idle connection lives
	// as long as in the other data planes; "0" to leave the kernel's setting.
	TCPTimeout    string        `json:"tcpTimeout" flag:"ipvs-tcp-timeout"`
	TCPFinTimeout time.Duration `json:"tcpFinTimeout" flag:"ipvs-tcpfin-timeout"` // after a FIN; 0 leaves the kernel's setting
	UDPTimeout    time.Duration `json:"udpTimeout" flag:"ipvs-udp-timeout"`       // of idle UDP flows; 0 leaves the kernel's setting
}

// NFTables holds what only the data plane nftables goes by (flags --nftables-*).
type NFTables struct {
	// Flowtable has established connections to endpoints pass by a flowtable, where the kernel has it.
	Flowtable bool `json:"flowtable" flag:"nftables-flowtable"`
}

// Conntrack holds what kproxy sets of the kernel's connection tracking (flags
// --conntrack-*, net.netfilter.nf_conntrack_*). 0 leaves the kernel's setting.
type Conntrack struct {
	MaxPerCore     int           `json:"maxPerCore" flag:"conntrack-max-per-core"` // entries, times the number of CPUs
	Min            int           `json:"min" flag:"conntrack-min"`                 // of entries, where MaxPerCore isn't 0
	TCPEstablished time.Duration `json:"tcpEstablishedTimeout" flag:"conntrack-tcp-timeout-established"`
	TCPCloseWait   time.Duration `json:"tcpCloseWaitTimeout" flag:"conntrack-tcp-timeout-close-wait"`
	UDP            time.Duration `json:"udpTimeout" flag:"conntrack-udp-timeout"`              // before an answer
	UDPStream      time.Duration `json:"udpStreamTimeout" flag:"conntrack-udp-timeout-stream"` // after it
	// TCPBeLiberal doesn't call packets outside the window invalid, and so doesn't
	// drop them: for networks in which answers take another way.
	TCPBeLiberal bool `json:"tcpBeLiberal" flag:"conntrack-tcp-be-liberal"`
}

// LikeConntrack as IPVS.TCPTimeout means nf_conntrack_tcp_timeout_established.
const LikeConntrack = "conntrack"

// Modes are the values of --mode, the default first.
var Modes = []string{"auto", "userspace", "iptables", "ipvs", "nftables"}

// DetectLocalModes are the values of --detect-local-mode, the default first.
var DetectLocalModes = []string{"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"}

// Words among Config.NodePortAddresses that stand for networks, as in
// KubeProxyConfiguration.
const (
	PrimaryAddresses   = "primary"   // the addresses of the Node object, one per family
	LocalhostAddresses = "localhost" // 127.0.0.0/8 and ::1
	AllAddresses       = "all"
)

// LogFormats are the values of --log-format, the default first.
var LogFormats = []string{"text", "json"}

// Protobuf is the content type kube-proxy asks for by default.
const Protobuf = "application/vnd.kubernetes.protobuf"

// Default returns the defaults of the flags. It has no source of services, so
// it isn't valid before Manifests is set. Whose services come from the
// Kubernetes API, or who has a KubeProxyConfiguration, gets AsKubeProxy's.
func Default() Config {
	return Config{
		Mode:                  "auto",
		MasqueradeBit:         14, // 0x4000, as kube-proxy
		TransparentBit:        12, // and 11: neither kube-proxy's masquerade bit nor its drop bit 15
		RouteTable:            10249,
		OffloadAfter:          10 * time.Second,
		OffloadMinConnections: 1,
		AliveTimeout:          3 * time.Second,
		DrainTimeout:          30 * time.Second,
		Health: Health{
			Interval: 2 * time.Second,
			Timeout:  time.Second,
			Rise:     2,
			Fall:     3,

			Annotations: true,
			MinInterval: time.Second,
			MaxRate:     2000,
		},
		PassiveHealth:        true,
		ResetDeadConnections: true,
		LocalhostNodePorts:   true,
		CloseClusterIPs:      true,
		Client:               Client{QPS: 5, Burst: 10, ContentType: Protobuf},
		IPVS:                 IPVS{TCPTimeout: LikeConntrack},
		MetricsBindAddress:   "127.0.0.1:10249",
		HealthzBindAddress:   "0.0.0.0:10256",
		Socket:               "/run/kproxy/kproxy.sock",
		StateDir:             "/var/lib/kproxy",
		StateMaxAge:          24 * time.Hour,
		// Fixed, so that flows which a kproxy carried that has died find the next
		// one; outside of Kubernetes' node ports and the kernel's ephemeral ports.
		ListenTCPPort: 10244,
		ListenUDPPort: 10244,
		// Some 10,000 series for a node: a cluster of 100 is still one Prometheus's.
		MetricsServices:  500,
		MetricsEndpoints: 1000,
		LogFormat:        "text",
		Verbosity:        "info",
	}
}

// AsKubeProxy returns the defaults on a node of a cluster, where kproxy stands
// in for kube-proxy: what that one does to the host unless configured otherwise is
// done here too. With manifests, nothing of it is changed unless asked.
func AsKubeProxy() Config {
	c := Default()
	oom := -999
	c.OOMScoreAdj = &oom
	c.Conntrack = Conntrack{
		MaxPerCore: 32 << 10, Min: 128 << 10,
		TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour,
	}
	return c
}
