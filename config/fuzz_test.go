package config

import (
	"os"
	"strings"
	"testing"
)

// Whatever a file holds, it is a mistake with its place, or a configuration that
// can be judged, explained, and written as a file that is read again as the same.
func FuzzParse(f *testing.F) {
	kubeadm, err := os.ReadFile("testdata/kubeadm.conf")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(kubeadm))
	f.Add(head + "mode: nftables\nnftables: {masqueradeBit: 4}\nnodePortAddresses: [primary, localhost]\n")
	f.Add(head + "conntrack: {max: 1, maxPerCore: -1, tcpEstablishedTimeout: 1.5s}\nudpIdleTimeout: 1s\n")
	f.Add(head + "bindAddress: 'fe80::1%eth0'\nhealthzBindAddress: '[::1]'\nclusterCIDR: ' ,'\n")
	f.Add(head + "clientConnection: {qps: -0.5, burst: 2147483647}\nlogging: {verbosity: 4294967295, vmodule: [{filePattern: a, verbosity: 1}]}\n")
	f.Add(head + "iptables: &x {syncPeriod: 2562047h47m16s}\nipvs: {<<: *x}\n")
	f.Fuzz(func(t *testing.T, text string) {
		file, err := Parse("f.conf", []byte(text))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f.conf:") {
				t.Errorf("no place in %q: %q", err, text)
			}
			return
		}
		c := AsKubeProxy()
		file.Apply(&c)
		c.InCluster = c.Kubeconfig == ""
		for _, o := range file.Outcomes(c, none) {
			if o.Line < 1 || o.String() == "" {
				t.Errorf("outcome %+v of %q", o, text)
			}
		}
		if file.Locate(c.Validate(), none) != nil {
			return
		}
		out, err := c.KubeProxyYAML()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse("g.conf", out); err != nil {
			t.Errorf("what was written can't be read: %v\nfrom %q", err, text)
		}
		if lost, err := c.NotInFile(); err != nil || len(lost) > 0 {
			t.Errorf("what a file said is lost in one that is written: %v, %v\nfrom %q", lost, err, text)
		}
	})
}
