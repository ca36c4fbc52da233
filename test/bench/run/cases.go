package main

import (
	"time"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// work is one kind of work.
type work struct {
	name string
	load.Work
}

// Loads end after so long where nothing else is said.
const (
	usualTime = 1500 * time.Millisecond
	longTime  = 2 * time.Second
)

// A run of UDP sessions is short, as each has a client's port of its own, and is repeated more often.
const (
	sessionCount  = 20_000
	sessionRounds = 3 // for each of others
)

// works are all of them.
func works() (out []work) {
	add := func(name, title string, l load.Load, figures ...load.Figure) {
		group := "TCP"
		if l.Kind.UDP() {
			group = "UDP"
		}
		for i := range figures {
			figures[i].Name = name + "/" + figures[i].Name
		}
		out = append(out, work{name, load.Work{Group: group, Title: title, Load: l, Figures: figures}})
	}
	bulk := func(name, title string, conns int) {
		add(name, title, load.Load{Kind: load.Bulk, Conns: conns, Time: usualTime},
			load.Figure{Name: "rate", Title: "throughput", Unit: "Gbit/s", Better: report.Higher, Value: (*load.Outcome).Gigabits}, cpuPerGB)
	}
	requests := func(name, title string, kind load.Kind, conns int) {
		add(name, title, load.Load{Kind: kind, Conns: conns, Time: usualTime},
			rate("requests"), load.Micros("p50", "median", (*load.Outcome).P50), load.Micros("p99", "99th percentile", (*load.Outcome).P99), cpuPer(100_000, "100,000 requests"))
	}
	datagrams := func(name, title string, kind load.Kind) {
		add(name, title, load.Load{Kind: kind, Conns: 4, Time: usualTime}, rate("datagrams that arrived"),
			load.Figure{Name: "arrived", Title: "share that arrived", Unit: "%", Better: report.Higher, Value: arrived}, cpuPerGB)
	}
	bulk("tcp-bulk-1", "TCP bulk, 1 stream", 1)
	bulk("tcp-bulk-16", "TCP bulk, 16 streams", 16)
	add("tcp-short", "new TCP connections, 64 at a time", load.Load{Kind: load.Short, Conns: 64, Time: longTime},
		rate("connections"), load.Micros("p50", "connect to close, median", (*load.Outcome).P50), load.Micros("p99", "connect to close, 99th percentile", (*load.Outcome).P99), cpuPer(10_000, "10,000 connections"))
	requests("tcp-rr-1", "TCP request/response, 1 connection", load.Exchange, 1)
	requests("tcp-rr-64", "TCP request/response, 64 connections", load.Exchange, 64)
	requests("udp-rr-64", "UDP request/response, 64 sessions", load.Datagram, 64)
	add("udp-sessions", "new UDP sessions with one request each, 64 at a time", load.Load{Kind: load.Session, Conns: 64, Time: usualTime, Count: sessionCount},
		rate("sessions"), load.Micros("p99", "99th percentile", (*load.Outcome).P99), cpuPer(10_000, "10,000 sessions"))
	datagrams("udp-bulk", "UDP bulk, 4 sessions with 64 datagrams of 1400 bytes on the way", load.Window)
	datagrams("udp-flood", "UDP flood, 4 sessions, datagrams of 1400 bytes as fast as one thread sends", load.Flood)
	return out
}

func rate(of string) load.Figure {
	return load.Figure{Name: "rate", Title: of, Unit: "/s", Better: report.Higher, Value: (*load.Outcome).Rate}
}

func cpuPer(n float64, of string) load.Figure {
	return load.Figure{
		Name: "cpu", Title: "proxy's CPU per " + of, Unit: "s", Better: report.Lower, Proxied: true,
		Value: func(o *load.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Count)/n) },
	}
}

var cpuPerGB = load.Figure{
	Name: "cpu", Title: "proxy's CPU per gigabyte", Unit: "s/GB", Better: report.Lower, Proxied: true,
	Value: func(o *load.Outcome) float64 { return per(o.CPU.Proxy, float64(o.Bytes)/1e9) },
}

func arrived(o *load.Outcome) float64 { return per(100*float64(o.Count), float64(o.Count+o.Lost)) }

// per is 0 of nothing: the failure that led to it is in the report.
func per(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
