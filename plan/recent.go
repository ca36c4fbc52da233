package plan

import (
	"net/netip"
	"time"
)

// Ended is a connection or session that is over, or that no endpoint took.
type Ended struct {
	Time      time.Time      `json:"time"`
	Protocol  string         `json:"protocol"`
	Service   string         `json:"service,omitempty"` // namespace/name[:port]; empty where there is none at the address
	Client    netip.AddrPort `json:"client"`
	Address   netip.AddrPort `json:"address"`
	Endpoint  netip.AddrPort `json:"endpoint"` // the last that was tried; "" if none was
	DataPlane DataPlane      `json:"dataplane"`
	// LastedSeconds is 0 where the kernel doesn't tell.
	LastedSeconds float64 `json:"lastedSeconds"`
	BytesIn       uint64  `json:"bytesIn"`
	BytesOut      uint64  `json:"bytesOut"`
	Reset         bool    `json:"reset,omitempty"`   // it ended by a reset, or was cut short
	Refused       string  `json:"refused,omitempty"` // why no endpoint took it; empty if one did
}

// Talk counts what a client had with an endpoint of a service port, open connections included.
type Talk struct {
	Client      netip.Addr     `json:"client"`
	Endpoint    netip.AddrPort `json:"endpoint"` // "" for what no endpoint took
	Connections uint64         `json:"connections"`
	Refused     uint64         `json:"refused"`
	BytesIn     uint64         `json:"bytesIn"`
	BytesOut    uint64         `json:"bytesOut"`
	Last        time.Time      `json:"last"` // when one last ended; zero if all are open
}

// ConnectTime says how long userspace's last connects to an endpoint took.
type ConnectTime struct {
	Endpoint      netip.AddrPort `json:"endpoint"`
	Connects      int            `json:"connects"` // how many it is of: the last 64 at most
	MedianSeconds float64        `json:"medianSeconds"`
	MaxSeconds    float64        `json:"maxSeconds"`
}

// Recent holds what is remembered of a service port's clients.
type Recent struct {
	Ended    []Ended       `json:"ended"`    // that an endpoint took, newest first
	Refused  []Ended       `json:"refused"`  // that none took, newest first
	Talks    []Talk        `json:"talks"`    // most connections first
	Others   uint64        `json:"others"`   // connections of pairs for which there was no room
	Connects []ConnectTime `json:"connects"` // in the order of addresses
}
