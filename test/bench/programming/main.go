// Command programming measures what it takes to program the kernel for many
// services: kproxy against kube-proxy, fed by the same real API server, on one
// machine in one run.
//
//	go run ./test/bench/programming                          # 10,000 and 2,000 services × 10 endpoints, everything
//	go run ./test/bench/programming -services 1000 -subjects kproxy-nft,kube-proxy-iptables-nft -cases change
//	go run ./test/bench/programming -source manifests -subjects kproxy-nft -profiles /tmp/profiles
//	go run ./test/bench/programming -quick                   # 100 services once: does the rig work?
//
// It needs root: client, node, backends and the control plane are network
// namespaces of its own. etcd, kube-apiserver (test/kube/setup.sh) and an
// optimised kube-proxy are built once and kept in ~/.cache/kproxy-kube, and so is
// etcd's data with the objects of each number of services.
//
// Every endpoint answers: two backends own networks that hold them all. Ten of
// the services have one endpoint and are those that change, from the one backend
// to the other, so whoever connects sees which endpoint a proxy knows.
//
// Subjects take turns; in each turn a proxy starts on a node without rules, goes
// through the cases, and is removed with all that it programmed. What is waited
// for is bounded (-deadline): a proxy that takes longer fails its case.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(run()) }

func run() int {
	o, err := parseOptions(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "programming:", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := bench(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "programming:", err)
		return 1
	}
	return 0
}
