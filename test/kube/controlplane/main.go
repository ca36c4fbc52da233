// Command controlplane is a Kubernetes control plane in one file: the real etcd,
// kube-apiserver, kube-controller-manager and kubectl, from their Go modules, and
// kube-proxy to compare with.
// Its first argument, or the name that it is called by, says which it is.
//
// They are one program because they share most of their packages: linked apart,
// they take four times the disk and several times the time to link.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // the components' metrics of client-go
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args
	if _, ok := commands[name]; !ok && len(args) > 1 {
		args = args[1:]
		name = args[0]
	}
	if name == "etcd" {
		etcdmain.Main(args)
		return
	}
	command, ok := commands[name]
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: controlplane etcd|kube-apiserver|kube-controller-manager|kube-proxy|kubectl [ARGUMENT…]")
		os.Exit(2)
	}
	os.Args = args // flags and usage come from there
	os.Exit(cli.Run(command()))
}

// commands are the programs that are built on cobra.
var commands = map[string]func() *cobra.Command{
	"etcd":                    nil,
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              kubeproxy.NewProxyCommand,
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
}
