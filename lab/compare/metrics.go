package compare

import "kproxy.dev/kproxy/lab/compare/load"

// metric makes a figure of an outcome.
type metric struct {
	key   string
	kind  load.Kind
	title string
	unit  string
	more  bool // is better
	value func(*load.Outcome) float64
	parts func(*load.Outcome) []Part // nil for a figure that isn't made of any
}

// Keys of rows that findings and charts name.
const (
	keyThroughput        = "throughput"
	keyThroughputCPU     = "cpu-per-gb"
	keyConnections       = "connections"
	keyConnectionsCPU    = "cpu-per-10k-connections"
	keyConnectionsMedian = "connections-p50"
	keyConnectionsTail   = "connections-p99"
	keyRequestsMedian    = "requests-p50"
	keyRequestsTail      = "requests-p99"
	keyDatagramsMedian   = "datagrams-p50"
	keyDatagramsTail     = "datagrams-p99"
	keySessions          = "sessions"
	keySessionsCPU       = "cpu-per-10k-sessions"
	keyConnectMedian     = "connect-p50"
	keyConnectTail       = "connect-p99"
	keyAnswerMedian      = "first-answer-p50"
	keyAnswerTail        = "first-answer-p99"
)

// metrics are all figures, in the order of the table.
var metrics = []metric{
	{keyThroughput, load.Throughput, "TCP throughput, 4 streams", "Gbit/s", true, gigabits, nil},
	perUnit(keyThroughputCPU, load.Throughput, "CPU per gigabyte", "s/GB", gigabytes),
	{keyConnections, load.Connections, "new TCP connections, 16 at a time", "/s", true, rate, nil},
	micros(keyConnectionsMedian, load.Connections, "connect to answer, median", exchange, median50),
	micros(keyConnectionsTail, load.Connections, "connect to answer, 99th percentile", exchange, tail99),
	perUnit(keyConnectionsCPU, load.Connections, "CPU per 10,000 connections", "s", tenThousands),
	micros(keyRequestsMedian, load.Requests, "TCP request, median", exchange, median50),
	micros(keyRequestsTail, load.Requests, "TCP request, 99th percentile", exchange, tail99),
	micros(keyDatagramsMedian, load.Datagrams, "UDP request, median", exchange, median50),
	micros(keyDatagramsTail, load.Datagrams, "UDP request, 99th percentile", exchange, tail99),
	{keySessions, load.Sessions, "new UDP sessions, 8 at a time", "/s", true, rate, nil},
	perUnit(keySessionsCPU, load.Sessions, "CPU per 10,000 UDP sessions", "s", tenThousands),
	micros(keyConnectMedian, load.Firsts, "connect, median", connect, median50),
	micros(keyConnectTail, load.Firsts, "connect, 99th percentile", connect, tail99),
	micros(keyAnswerMedian, load.Firsts, "connect to first answer, median", exchange, median50),
	micros(keyAnswerTail, load.Firsts, "connect to first answer, 99th percentile", exchange, tail99),
}

func gigabits(o *load.Outcome) float64     { return float64(o.Bytes) * 8 / 1e9 / o.Seconds }
func gigabytes(o *load.Outcome) float64    { return float64(o.Bytes) / 1e9 }
func rate(o *load.Outcome) float64         { return float64(o.Count) / o.Seconds }
func tenThousands(o *load.Outcome) float64 { return float64(o.Count) / 1e4 }

func connect(o *load.Outcome) *load.Percentiles  { return o.Connect }
func exchange(o *load.Outcome) *load.Percentiles { return o.Exchange }

func median50(p *load.Percentiles) float64 { return p.P50 }
func tail99(p *load.Percentiles) float64   { return p.P99 }

// micros is a percentile of how long something took.
func micros(key string, k load.Kind, title string, of func(*load.Outcome) *load.Percentiles, which func(*load.Percentiles) float64) metric {
	return metric{key, k, title, "µs", false, func(o *load.Outcome) float64 { return which(of(o)) }, nil}
}

// perUnit is the processors' time for a unit of work, and who used it.
func perUnit(key string, k load.Kind, title, unit string, work func(*load.Outcome) float64) metric {
	return metric{key, k, title, unit, false,
		func(o *load.Outcome) float64 { return o.CPU.Total() / work(o) },
		func(o *load.Outcome) []Part {
			w := work(o)
			return []Part{
				{"client", o.CPU.Client / w}, {"backend", o.CPU.Backend / w}, {"kproxy", o.CPU.Proxy / w},
				{"kernel threads", (o.CPU.Softirqd + o.CPU.SoftIRQ) / w},
			}
		}}
}
