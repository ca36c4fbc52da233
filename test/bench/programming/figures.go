package main

import (
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/lab/compare/statistics"
	"kproxy.dev/kproxy/test/bench/result"
)

// figure is the name of a case in the report.
type figure string

// The figures.
const (
	figStartAnswer    figure = "programming-start/answer"
	figStartKernel    figure = "programming-start/kernel"
	figStartCPU       figure = "programming-start/cpu"
	figStartCalm      figure = "programming-start/cpu-calm"
	figRSS            figure = "programming-memory/rss"
	figPss            figure = "programming-memory/pss"
	figPeak           figure = "programming-memory/peak"
	figRSSLater       figure = "programming-memory/rss-changed"
	figConnectOther   figure = "programming-connect/other"
	figConnectService figure = "programming-connect/service"
	figChange         figure = "programming-change/write"
	figChangeTold     figure = "programming-change/told"
	figChangeKernel   figure = "programming-change/kernel"
	figChangeCPU      figure = "programming-change/cpu"
	figChangeChildren figure = "programming-change/cpu-children"
	figIdleCPU        figure = "programming-change/idle-cpu"
	figBackToBack     figure = "programming-change/back-to-back"
	figRecallOwn      figure = "programming-move/recall-own"
	figRecall         figure = "programming-move/recall"
	figOffloadOwn     figure = "programming-move/offload-own"
	figOffload        figure = "programming-move/offload"
)

// from is the case that a figure comes from.
func (f figure) from() string {
	switch f {
	case figChangeCPU, figChangeChildren, figIdleCPU:
		return caseCPU
	case figBackToBack:
		return caseBackToBack
	}
	kind, _, _ := strings.Cut(strings.TrimPrefix(string(f), "programming-"), "/")
	return kind
}

// caseName is what the report calls a figure: with the number of services, so that
// reports of several can be merged.
func (f figure) caseName(services int) string {
	kind, what, _ := strings.Cut(string(f), "/")
	return fmt.Sprintf("%s-%d/%s", kind, services, what)
}

// targeted is the number of services that targets are about.
const targeted = 10_000

// anyNumber reports whether a target holds with fewer services too: a change takes
// effect at once whatever their number, and kube-proxy's slowest mode isn't measured
// with more.
func anyNumber(of figure, t result.Target) bool {
	return of == figChangeTold || slices.Contains(t.Against, "kube-proxy-iptables-nft")
}

// described are the cases of the report without their values, in its order.
func described(w world) []result.Case {
	const (
		start, change = "cold start of the proxy, API full of services", "one service's only endpoint moves"
		nft, legacy   = "kproxy-nft", "kproxy-legacy"
	)
	// against sets bounds on kproxy's figures as ratios to kube-proxy's modes.
	against := func(byNFT, byLegacy float64) []result.Target {
		return []result.Target{
			{Subject: nft, Against: []string{"kube-proxy-iptables-nft"}, Bound: byNFT},
			{Subject: nft, Against: []string{"kube-proxy-nftables"}, Bound: byNFT},
			{Subject: legacy, Against: []string{"kube-proxy-iptables-legacy"}, Bound: byLegacy},
		}
	}
	atMost := func(bound float64, names ...string) (out []result.Target) {
		for _, name := range names {
			out = append(out, result.Target{Subject: name, Bound: bound})
		}
		return out
	}
	toNobody := func(bound float64) []result.Target {
		return []result.Target{{Subject: nft, Against: []string{"no-proxy"}, Bound: bound}, {Subject: legacy, Against: []string{"no-proxy"}, Bound: bound}}
	}
	all := []result.Case{
		{Name: string(figStartAnswer), Work: start, Figure: "until services everywhere in the table answer", Unit: "s"},
		{Name: string(figStartKernel), Work: start, Figure: "until all rules are in the kernel", Unit: "s", Targets: append(against(0.1, 0.1), atMost(5, nft, legacy)...)},
		{Name: string(figStartCPU), Work: start, Figure: "CPU time until then, with children", Unit: "s"},
		{Name: string(figStartCalm), Work: start, Figure: "CPU time until idle, with children", Unit: "s"},
		{Name: string(figChange), Work: change, Figure: "from the write until new connections follow, p50", Unit: "ms"},
		{Name: string(figChangeTold), Work: change, Figure: "the same, from when the source has reported it to a watcher, p50", Unit: "ms", Targets: atMost(5, nft, legacy, "kproxy-userspace")},
		{Name: string(figChangeKernel), Work: change, Figure: "from the write until the kernel's rules have it, p50", Unit: "ms"},
		{Name: string(figChangeCPU), Work: change, Figure: "CPU time of a change, with children", Unit: "ms", Targets: against(0.1, 0.3)},
		{Name: string(figChangeChildren), Work: change, Figure: "of that, children such as iptables-restore", Unit: "ms"},
		{Name: string(figIdleCPU), Work: "nothing changes", Figure: "CPU time in a second", Unit: "ms"},
		{Name: string(figBackToBack), Work: "changes back to back", Figure: "each", Unit: "ms"},
		{Name: string(figConnectOther), Work: "connect to an address that is no service's", Figure: "p50", Unit: "µs", Targets: toNobody(1.1)},
		{Name: string(figConnectService), Work: "connect to a service, any of all", Figure: "p50", Unit: "µs", Targets: toNobody(1.5)},
		{Name: string(figRecallOwn), Work: "recall of one service", Figure: "kproxy's pass", Unit: "ms", Targets: atMost(1, nft, legacy)},
		{Name: string(figRecall), Work: "recall of one service", Figure: "from the request until connections go through userspace", Unit: "ms"},
		{Name: string(figOffloadOwn), Work: "offload of one service", Figure: "kproxy's pass", Unit: "ms", Targets: atMost(1, nft, legacy)},
		{Name: string(figOffload), Work: "offload of one service", Figure: "from the request until connections go through the kernel", Unit: "ms"},
		{Name: string(figRSS), Work: "memory of the process, nothing has changed yet", Figure: "RSS", Unit: "MiB", Targets: against(0.6, 0.6)},
		{Name: string(figPss), Work: "memory of the process, nothing has changed yet", Figure: "PSS", Unit: "MiB"},
		{Name: string(figPeak), Work: "memory of the process, nothing has changed yet", Figure: "highest RSS since its start", Unit: "MiB"},
		{Name: string(figRSSLater), Work: "memory of the process after 100 changes", Figure: "RSS", Unit: "MiB"},
	}
	for i := range all {
		if w.services < targeted {
			all[i].Targets = slices.DeleteFunc(all[i].Targets, func(t result.Target) bool { return !anyNumber(figure(all[i].Name), t) })
		}
		all[i].Group, all[i].Better = fmt.Sprintf("Programming the kernel, %s services × %d endpoints", statistics.Thousands(w.services), w.endpoints), result.Lower
	}
	return all
}
