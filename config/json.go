package config

import (
	"encoding/json"
	"time"
)

// MarshalJSON is what /configz shows: durations as people write them, "1m30s".
func (c Config) MarshalJSON() ([]byte, error) {
	type plain Config
	return json.Marshal(struct {
		plain
		OffloadAfter string `json:"offloadAfter"`
		AliveTimeout string `json:"aliveTimeout"`
		DrainTimeout string `json:"drainTimeout"`
	}{plain(c), text(c.OffloadAfter), text(c.AliveTimeout), text(c.DrainTimeout)})
}

// MarshalJSON writes durations as Config's does.
func (h Health) MarshalJSON() ([]byte, error) {
	type plain Health
	return json.Marshal(struct {
		plain
		Interval    string `json:"interval"`
		Timeout     string `json:"timeout"`
		MinInterval string `json:"minInterval"`
	}{plain(h), text(h.Interval), text(h.Timeout), text(h.MinInterval)})
}

// MarshalJSON writes durations as Config's does.
func (c Conntrack) MarshalJSON() ([]byte, error) {
	type plain Conntrack
	return json.Marshal(struct {
		plain
		TCPEstablished string `json:"tcpEstablishedTimeout"`
		TCPCloseWait   string `json:"tcpCloseWaitTimeout"`
		UDP            string `json:"udpTimeout"`
		UDPStream      string `json:"udpStreamTimeout"`
	}{plain(c), text(c.TCPEstablished), text(c.TCPCloseWait), text(c.UDP), text(c.UDPStream)})
}

// MarshalJSON writes durations as Config's does.
func (i IPVS) MarshalJSON() ([]byte, error) {
	type plain IPVS
	return json.Marshal(struct {
		plain
		TCPFinTimeout string `json:"tcpFinTimeout"`
		UDPTimeout    string `json:"udpTimeout"`
	}{plain(i), text(i.TCPFinTimeout), text(i.UDPTimeout)})
}

func text(d time.Duration) string { return d.String() }
