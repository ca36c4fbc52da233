package config

import "time"

// Protobuf is the content type kube-proxy asks for unless told otherwise.
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
		LocalhostNodePorts: true,
		Client:             Client{QPS: 5, Burst: 10, ContentType: Protobuf},
		IPVS:               IPVS{TCPTimeout: LikeConntrack},
		MetricsBindAddress: "127.0.0.1:10249",
		HealthzBindAddress: "0.0.0.0:10256",
		Socket:             "/run/kproxy/kproxy.sock",
		StateDir:           "/var/lib/kproxy",
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
