package compare

import (
	"fmt"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// works are the loads that don't depend on the number of services.
func (c Config) works() []load.Work {
	streams := load.Load{Kind: load.Bulk, Conns: 4, Time: c.Time}
	connections := load.Load{Kind: load.Short, Conns: 16, Count: c.Connections, Time: c.Time}
	sessions := load.Load{Kind: load.Session, Conns: 8, Count: c.Sessions, Time: c.Time}
	return []load.Work{
		{Group: "Throughput", Title: "4 TCP streams", Load: streams, Figures: []load.Figure{
			{Name: "throughput", Title: "throughput", Unit: "Gbit/s", Better: report.Higher, Value: (*load.Outcome).Gigabits},
			perUnit("cpu-per-gb", "CPU per gigabyte", "s/GB", func(o *load.Outcome) float64 { return float64(o.Bytes) / 1e9 }),
		}},
		{Group: "New connections", Title: "new TCP connections, 16 at a time", Load: connections, Figures: []load.Figure{
			{Name: "connections", Title: "rate", Unit: "/s", Better: report.Higher, Value: (*load.Outcome).Rate},
			load.Micros("connections-p50", "connect to close, median", (*load.Outcome).P50),
			load.Micros("connections-p99", "connect to close, 99th percentile", (*load.Outcome).P99),
			perUnit("cpu-per-10k-connections", "CPU per 10,000", "s", tenThousands),
		}},
		{Group: "Requests", Title: "TCP request", Load: load.Load{Kind: load.Exchange, Conns: 1, Time: c.Short}, Figures: []load.Figure{
			load.Micros("requests-p50", "median", (*load.Outcome).P50), load.Micros("requests-p99", "99th percentile", (*load.Outcome).P99),
		}},
		{Group: "Requests", Title: "UDP request", Load: load.Load{Kind: load.Datagram, Conns: 1, Time: c.Short}, Figures: []load.Figure{
			load.Micros("datagrams-p50", "median", (*load.Outcome).P50), load.Micros("datagrams-p99", "99th percentile", (*load.Outcome).P99),
		}},
		{Group: "New UDP sessions", Title: "new UDP sessions, 8 at a time", Load: sessions, Figures: []load.Figure{
			{Name: "sessions", Title: "rate", Unit: "/s", Better: report.Higher, Value: (*load.Outcome).Rate},
			perUnit("cpu-per-10k-sessions", "CPU per 10,000", "s", tenThousands),
		}},
	}
}

// firsts are new connections to one of n services, one after the other.
func (c Config) firsts(n int, group string) load.Work {
	name := func(s string) string { return fmt.Sprintf("%s-%d", s, n) }
	return load.Work{
		Group: group, Title: fmt.Sprintf("first packets among %s", report.Count(n, "service")),
		Load: load.Load{Kind: load.First, Conns: 1, Count: c.Firsts, Time: c.Time},
		Figures: []load.Figure{
			load.Micros(name("connect-p50"), "connect, median", func(o *load.Outcome) float64 { return o.Connect.P50 }),
			load.Micros(name("connect-p99"), "connect, 99th percentile", func(o *load.Outcome) float64 { return o.Connect.P99 }),
			load.Micros(name("first-answer-p50"), "connect to first answer, median", (*load.Outcome).P50),
			load.Micros(name("first-answer-p99"), "connect to first answer, 99th percentile", (*load.Outcome).P99),
		},
	}
}

func tenThousands(o *load.Outcome) float64 { return float64(o.Count) / 1e4 }

// perUnit is the processors' time for a unit of work, and who used it.
func perUnit(name, title, unit string, units func(*load.Outcome) float64) load.Figure {
	return load.Figure{
		Name: name, Title: title, Unit: unit, Better: report.Lower,
		Value: func(o *load.Outcome) float64 { return o.CPU.Total() / units(o) },
		Parts: func(o *load.Outcome) []report.Part {
			n := units(o)
			return []report.Part{{Name: "client", Value: o.CPU.Client / n}, {Name: "backend", Value: o.CPU.Backend / n}, {Name: "kproxy", Value: o.CPU.Proxy / n}, {Name: "kernel threads", Value: o.CPU.Softirqd / n}}
		},
	}
}

// notes explain the report, and its groups.
func notes(c Config) []report.Note {
	accounting := "this kernel accounts softirqs to the process they interrupt"
	if load.InterruptsApart() {
		accounting = "and all time in interrupts and softirqs, which this kernel accounts to no process (CONFIG_IRQ_TIME_ACCOUNTING)"
	}
	return []report.Note{
		{Title: "direct: the limit", Text: "The client knows the address of a backend, and the node between them only routes. No service address, no choice, no rule and no connection tracking: what a data plane does comes on top of this."},
		{Title: "userspace: the first generation", Text: "A rule redirects a connection to kproxy, which accepts it, chooses a backend, opens a second connection to it, and hands bytes from one to the other. Every byte enters the process's sockets and leaves them again, every connection is two, and a request waits twice for a process to wake up. In return kproxy sees everything: it can try another backend when one refuses, balance by open connections, and tell which clients use which endpoint."},
		{Title: "iptables: the second generation", Text: "A rule rewrites the destination of a connection's first packet to a backend (DNAT); connection tracking does the same to every other packet. No process is woken. The price is that the first packet of a connection must find the service's rule, and every packet is looked up in the connection table. In a list, finding a rule takes longer with every service; kproxy's rules are a tree of chains by address, which grows with the logarithm. The choice is only as clever as a rule can be: by chance or in turn."},
		{Title: "ipvs: the third generation", Text: "The kernel's own load balancer. A hash table finds the service, so their number doesn't matter, and real schedulers choose, least connections among them. It keeps a table of connections of its own, beside connection tracking, which masquerading needs: two lookups instead of one."},
		{Title: "nftables: the fourth generation", Text: "The kernel rewrites the destination as iptables has it done, but services are elements of maps: one look-up finds the service, one its backend, and there are as many rules with ten thousand services as with ten."},
		{Title: "Throughput", Text: "Four TCP streams send as fast as they can. Once a connection is made, the kernel's data planes only rewrite headers, so what is left of their cost is a table lookup for each packet, and packets are large here. Userspace has to pass on every byte. The processors' time for a gigabyte is the better measure of the two: throughput is limited by the processor that is full first, client's and backend's work included, while the time says what the others on this node don't get. What the kernel forwards, it forwards on somebody's time, mostly that of the process whose packet it is. So the cost of a data plane in the kernel is not kproxy's part, but what the whole is above that of direct routing."},
		{Title: "New connections", Text: "Each connection is made, asks once, is answered, and is closed by the backend; sixteen at a time. Making a connection is what data planes have rules, choices and tables for. Because sixteen are under way at once, the time from connect to close is mostly time in a queue, and shows how full the machine is."},
		{Title: "Requests", Text: "One connection (or UDP session) that exists already, one request of 64 bytes after the other. What is measured is mostly waking up: of the backend and the client in any case, and of kproxy twice more in userspace. The 99th percentile is what one in a hundred requests exceeds; on a busy machine it says more about the machine than about the data plane."},
		{Title: "New UDP sessions", Text: "UDP has no connections. To the kernel, the first datagram from a port begins a flow; to kproxy in userspace it begins a session, with a socket of its own. Each session here is one request from a fresh port, as those of DNS are; eight at a time."},
		{Title: fmt.Sprintf("First packets among %s", report.Count(c.Services[0], "service")), Text: "One new connection after the other, nothing else at the same time, to a service in the middle of so many. Only the first packet of a connection has to find its service; this is what that costs. Connect ends when the connection is made: in userspace that is when kproxy has accepted it, before it has even chosen a backend, so look at connect to first answer as well, which ends when the backend's answer is there. Until all are programmed: from writing the manifests of services with three endpoints each until kproxy says so; measured once."},
		{Title: "Network", Text: "For every data plane a client, a node and three backends, each in a network namespace, joined by veth; the node routes every packet between client and backend. On the node a `kproxy run` with every service held in the data plane that is measured (none for direct). IPv4. Health checks are off."},
		{Title: "Loads", Text: fmt.Sprintf("Client and server are processes of their own: a thread for each stream, and event loops on two threads for requests. Requests run for %s, the others for %s, or until %s connections, %s sessions or %s first packets. Requests and answers have 64 bytes.", c.Short, c.Time, report.Thousands(c.Connections), report.Thousands(c.Sessions), report.Thousands(c.Firsts))},
		{Title: "Order", Text: fmt.Sprintf("%s of each load; in each, it goes through every data plane, which take turns in being the first. Figures are medians of the rounds, with the least and the greatest; ratios are made within a round.", report.Count(c.Repeat, "round"))},
		{Title: "Certainty of the data plane", Text: "After each run the kernel's connection table was read for some connections of the load, and each had to be there and to have gone the way that was meant: rewritten to kproxy's listener (userspace), to a backend by a rule (iptables, nftables), to a backend by IPVS, or not at all (direct). Before and after all loads kproxy's status had to agree for every service. A run that fails this is no figure: the comparison ends with an error."},
		{Title: "Processors' time", Text: "Client, backend and kproxy are what those processes used, in the kernel on their behalf too. Kernel threads is what ksoftirqd used; " + accounting + ". What other programs and the hypervisor used is in no figure."},
		{Title: "What such figures can't say", Text: "There is no network card here, no cable and no second machine. Packets are large and never lost, and what cards do (checksums, segments, several queues) costs nothing. Client, node and backends share the processors: what the proxy uses, the others lack. Absolute figures are this machine's; ratios carry over better, but not to other kernels, packet sizes or numbers of processors. A program that does something with a request takes longer than all of this: what matters to it is the difference in microseconds, not the ratio."},
	}
}
