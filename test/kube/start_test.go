package kube

import "testing"

func TestStart(t *testing.T) {
	w := newWorld(t, "iptables")
	out, err := w.kubectl(w.ctx, "get", "all,endpointslices,nodes,sa", "-A")
	t.Log(out, err)
	w.run()
}
