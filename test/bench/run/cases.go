package main

import (
	"time"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// work is one kind of work, and the figures that come of it.
type work struct {
	name    string
	title   string
	load    load.Load
	figures []figure
}

// figure makes a number of an outcome.
type figure struct {
	name, title, unit string
	better            report.Better
	value             func(*load.Outcome) float64
	proxied           bool // makes sense for proxies only
}

// Loads end after so long where nothing else is said.
const (
	usualTime = 1500 * time.Millisecond
	longTime  = 2 * time.Second
)

// sessionCount bounds the UDP sessions of a run. kproxy keeps a descriptor for each
// for at least a second, as it can't know that no more is to come, and gives UDP a
// quarter of the descriptors that it may have: a run stays within half of that, so
// that sessions of the one before can make room. It is short therefore, and is
// repeated more often.
const (
	sessionCount       = 20_000
	sessionDescriptors = 10 // descriptors for each
	sessionRounds      = 3  // for each of others
)

// works are all of them.
func works(descriptors int) []work {
	requests := []figure{
		{"rate", "requests", "/s", report.Higher, rate, false},
		{"p50", "median", "µs", report.Lower, p50, false},
		{"p99", "99th percentile", "µs", report.Lower, p99, false},
		{"cpu", "proxy's CPU per 100,000 requests", "s", report.Lower, cpuPer(100_000), true},
	}
	bulk := []figure{
		{"rate", "throughput", "Gbit/s", report.Higher, gigabits, false},
		{"cpu", "proxy's CPU per gigabyte", "s/GB", report.Lower, cpuPerGB, true},
	}
	datagrams := []figure{
		{"rate", "datagrams that arrived", "/s", report.Higher, rate, false},
		{"arrived", "share that arrived", "%", report.Higher, arrived, false},
		{"cpu", "proxy's CPU per gigabyte", "s/GB", report.Lower, cpuPerGB, true},
	}
	return []work{
		{"tcp-bulk-1", "TCP bulk, 1 stream", load.Load{Kind: load.Bulk, Conns: 1, Time: usualTime}, bulk},
		{"tcp-bulk-16", "TCP bulk, 16 streams", load.Load{Kind: load.Bulk, Conns: 16, Time: usualTime}, bulk},
		{"tcp-short", "new TCP connections, 64 at a time", load.Load{Kind: load.Short, Conns: 64, Time: longTime}, []figure{
			{"rate", "connections", "/s", report.Higher, rate, false},
			{"p50", "connect to close, median", "µs", report.Lower, p50, false},
			{"p99", "connect to close, 99th percentile", "µs", report.Lower, p99, false},
			{"cpu", "proxy's CPU per 10,000 connections", "s", report.Lower, cpuPer(10_000), true},
		}},
		{"tcp-rr-1", "TCP request/response, 1 connection", load.Load{Kind: load.Exchange, Conns: 1, Time: usualTime}, requests},
		{"tcp-rr-64", "TCP request/response, 64 connections", load.Load{Kind: load.Exchange, Conns: 64, Time: usualTime}, requests},
		{"udp-rr-64", "UDP request/response, 64 sessions", load.Load{Kind: load.Datagram, Conns: 64, Time: usualTime}, requests},
		{"udp-sessions", "new UDP sessions with one request each, 64 at a time", load.Load{Kind: load.Session, Conns: 64, Time: usualTime, Count: min(sessionCount, descriptors/sessionDescriptors)}, []figure{
			{"rate", "sessions", "/s", report.Higher, rate, false},
			{"p99", "99th percentile", "µs", report.Lower, p99, false},
			{"cpu", "proxy's CPU per 10,000 sessions", "s", report.Lower, cpuPer(10_000), true},
		}},
		{"udp-bulk", "UDP bulk, 4 sessions with 64 datagrams of 1400 bytes on the way", load.Load{Kind: load.Window, Conns: 4, Time: usualTime}, datagrams},
		{"udp-flood", "UDP flood, 4 sessions, datagrams of 1400 bytes as fast as one thread sends", load.Load{Kind: load.Flood, Conns: 4, Time: usualTime}, datagrams},
	}
}

func gigabits(o *load.Outcome) float64 { return float64(o.Bytes) * 8 / 1e9 / o.Seconds }
func rate(o *load.Outcome) float64     { return float64(o.Count) / o.Seconds }
func cpuPerGB(o *load.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Bytes)/1e9) }

func cpuPer(n float64) func(*load.Outcome) float64 {
	return func(o *load.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Count)/n) }
}

func arrived(o *load.Outcome) float64 { return per(100*float64(o.Count), float64(o.Count+o.Lost)) }

// per is 0 of nothing: the failure that led to it is in the report.
func per(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func p50(o *load.Outcome) float64 {
	if o.Exchange == nil {
		return 0
	}
	return o.Exchange.P50
}

func p99(o *load.Outcome) float64 {
	if o.Exchange == nil {
		return 0
	}
	return o.Exchange.P99
}
