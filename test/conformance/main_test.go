package main

import (
	"strings"
	"testing"
)

// What is wrong with the options is said before a cluster is made, which takes minutes.
func TestOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*options)
		want   string
	}{
		"mode":                       {func(o *options) { o.modes = "nftables,ipvs" }, `-modes: no proxy is called "ipvs"`},
		"number of nodes":            {func(o *options) { o.nodes = 10 }, "-nodes: 10 is not between 1 and 9"},
		"pod network":                {func(o *options) { o.podNetwork = "vxlan" }, `-pod-network: "vxlan" is none of`},
		"focus":                      {func(o *options) { o.focus = "session (affinity" }, "-focus: error parsing regexp: missing closing )"},
		"tests at once":              {func(o *options) { o.procs = 0 }, "-procs: 0 is less than 1"},
		"a rollout of kube-proxy":    {func(o *options) { o.modes, o.rollout = "kube-proxy", true }, "-rollout, -plugin: kube-proxy is no mode of kproxy"},
		"the plugin with kube-proxy": {func(o *options) { o.modes, o.plugin = "nftables,kube-proxy", true }, "-rollout, -plugin: kube-proxy is no mode of kproxy"},
		"README in another mode":     {func(o *options) { o.modes, o.readme = "nftables", true }, "-readme: kproxy takes kube-proxy's mode"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options{modes: "nftables", nodes: 3, podNetwork: "bridge", procs: 4, programs: "x"}
			tc.change(&o)
			if err := o.check(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}
