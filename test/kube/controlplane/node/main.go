// Command node is what test/conformance needs of Kubernetes besides the control plane, in
// one file: the real kubelet and kube-scheduler, from their Go modules. Its first
// argument, or the name that it is called by, says which it is. It is apart from the
// control plane, which most tests need without these.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // the components' metrics of client-go
	_ "k8s.io/component-base/metrics/prometheus/version"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args
	if _, ok := commands[name]; !ok && len(args) > 1 {
		args = args[1:]
		name = args[0]
	}
	command, ok := commands[name]
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: node kubelet|kube-scheduler [ARGUMENT…]")
		os.Exit(2)
	}
	os.Args = args // flags and usage come from there
	os.Exit(cli.Run(command()))
}

var commands = map[string]func() *cobra.Command{
	"kubelet":        func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kube-scheduler": func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}
