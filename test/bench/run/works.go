package main

import (
	"time"

	"kproxy.dev/kproxy/test/bench/result"
	"kproxy.dev/kproxy/test/bench/subject"
	"kproxy.dev/kproxy/test/bench/traffic"
)

// work is one kind of work, and the figures that come of it.
type work struct {
	name    string
	title   string
	load    traffic.Load
	figures []figure
}

// figure makes a number of an outcome.
type figure struct {
	name, title, unit string
	better            result.Better
	value             func(*traffic.Outcome) float64
	proxied           bool // makes sense for proxies only
	bound             float64
	against           peers // whom the bound is about
}

// peers are those that a bound is about: for the engine, which clients address
// directly, and for kproxy as it is deployed, which a rule leads to.
type peers struct{ engine, kproxy []string }

var (
	haproxies = peers{[]string{subject.HAProxy, subject.HAProxySplice}, []string{subject.HAProxyRedirect}}
	nginxes   = peers{[]string{subject.Nginx}, []string{subject.NginxRedirect}}
)

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

// works are all of them. The bounds are the targets of docs/performance.md.
func works(descriptors int) []work {
	return []work{
		{"tcp-bulk-1", "TCP bulk, 1 stream", traffic.Load{Kind: traffic.Bulk, Conns: 1, Time: usualTime}, bulk(1.3)},
		{"tcp-bulk-16", "TCP bulk, 16 streams", traffic.Load{Kind: traffic.Bulk, Conns: 16, Time: usualTime}, bulk(1.1)},
		{"tcp-short", "new TCP connections, 64 at a time", traffic.Load{Kind: traffic.Short, Conns: 64, Time: longTime}, []figure{
			{"rate", "connections", "/s", result.Higher, rate, false, 1.1, haproxies},
			{"p50", "connect to close, median", "µs", result.Lower, p50, false, 0, peers{}},
			{"p99", "connect to close, 99th percentile", "µs", result.Lower, p99, false, 0, peers{}},
			{"cpu", "proxy's CPU per 10,000 connections", "s", result.Lower, cpuPer(10_000), true, 0.9, haproxies},
		}},
		{"tcp-rr-1", "TCP request/response, 1 connection", traffic.Load{Kind: traffic.Exchange, Conns: 1, Time: usualTime}, exchanges()},
		{"tcp-rr-64", "TCP request/response, 64 connections", traffic.Load{Kind: traffic.Exchange, Conns: 64, Time: usualTime}, exchanges()},
		{"udp-rr-64", "UDP request/response, 64 sessions", traffic.Load{Kind: traffic.Datagram, Conns: 64, Time: usualTime}, []figure{
			{"rate", "requests", "/s", result.Higher, rate, false, 1.2, nginxes},
			{"p50", "median", "µs", result.Lower, p50, false, 0, peers{}},
			{"p99", "99th percentile", "µs", result.Lower, p99, false, 0, peers{}},
			{"cpu", "proxy's CPU per 100,000 requests", "s", result.Lower, cpuPer(100_000), true, 0, peers{}},
		}},
		{"udp-sessions", "new UDP sessions with one request each, 64 at a time", traffic.Load{Kind: traffic.Session, Conns: 64, Time: usualTime, Count: min(sessionCount, descriptors/sessionDescriptors)}, []figure{
			{"rate", "sessions", "/s", result.Higher, rate, false, 1.4, nginxes},
			{"p99", "99th percentile", "µs", result.Lower, p99, false, 0, peers{}},
			{"cpu", "proxy's CPU per 10,000 sessions", "s", result.Lower, cpuPer(10_000), true, 0, peers{}},
		}},
		{"udp-bulk", "UDP bulk, 4 sessions with 64 datagrams of 1400 bytes on the way", traffic.Load{Kind: traffic.Window, Conns: 4, Time: usualTime}, datagrams(1.5)},
		{"udp-flood", "UDP flood, 4 sessions, datagrams of 1400 bytes as fast as one thread sends", traffic.Load{Kind: traffic.Flood, Conns: 4, Time: usualTime}, datagrams(1.5)},
	}
}

func bulk(bound float64) []figure {
	return []figure{
		{"rate", "throughput", "Gbit/s", result.Higher, gigabits, false, bound, haproxies},
		{"cpu", "proxy's CPU per gigabyte", "s/GB", result.Lower, cpuPerGB, true, 0.7, haproxies},
	}
}

func exchanges() []figure {
	return []figure{
		{"rate", "requests", "/s", result.Higher, rate, false, 1.1, haproxies},
		{"p50", "median", "µs", result.Lower, p50, false, 0.95, haproxies},
		{"p99", "99th percentile", "µs", result.Lower, p99, false, 1.0, haproxies},
		{"cpu", "proxy's CPU per 100,000 requests", "s", result.Lower, cpuPer(100_000), true, 0, peers{}},
	}
}

// datagrams are the figures of large ones. That no more be lost is asked as: no
// less arrive, with a thousandth for chance.
func datagrams(bound float64) []figure {
	return []figure{
		{"rate", "datagrams that arrived", "/s", result.Higher, rate, false, bound, nginxes},
		{"arrived", "share that arrived", "%", result.Higher, arrived, false, 0.999, nginxes},
		{"cpu", "proxy's CPU per gigabyte", "s/GB", result.Lower, cpuPerGB, true, 0, peers{}},
	}
}

func gigabits(o *traffic.Outcome) float64 { return float64(o.Bytes) * 8 / 1e9 / o.Seconds }
func rate(o *traffic.Outcome) float64     { return float64(o.Count) / o.Seconds }

func cpuPerGB(o *traffic.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Bytes)/1e9) }

func cpuPer(n float64) func(*traffic.Outcome) float64 {
	return func(o *traffic.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Count)/n) }
}

func arrived(o *traffic.Outcome) float64 {
	return per(100*float64(o.Count), float64(o.Count+o.Lost))
}

// per is 0 of nothing: the failure that led to it is in the report.
func per(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func p50(o *traffic.Outcome) float64 {
	if o.Exchange == nil {
		return 0
	}
	return o.Exchange.P50
}

func p99(o *traffic.Outcome) float64 {
	if o.Exchange == nil {
		return 0
	}
	return o.Exchange.P99
}
