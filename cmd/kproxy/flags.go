package main

import (
	"github.com/urfave/cli/v2"
)

// DefaultSocket is where a running kproxy listens for the other commands.
const defaultSocket = "/run/kproxy/kproxy.sock"

func socketFlag() cli.Flag {
	return &cli.StringFlag{Name: "socket", Usage: "control socket of the running kproxy, a `PATH`", Value: defaultSocket}
}

func manifestsFlag() cli.Flag {
	return &cli.StringSliceFlag{Name: "manifests", Usage: "file or directory with Kubernetes manifests, a `PATH`; repeatable"}
}

func nodeFlag() cli.Flag {
	return &cli.StringFlag{Name: "node", Usage: "`NAME` of the node to decide for", Value: hostName()}
}
