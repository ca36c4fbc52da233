package conntrack

import (
	"testing"

	"kproxy.dev/kproxy/service"
)

// TestListTo: flows to one endpoint, and the kernel hands over no others.
func TestListTo(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		one, other, dst, dst2, client := at(f, pods, 2, 5353), at(f, pods, 3, 5354), at(f, services, 10, 53), at(f, services, 11, 53), at(f, clients, 2, 5000)
		server(t, one)
		server(t, other)
		rewrite(t, dst, one)
		rewrite(t, dst2, other)
		again(t, ask(t, client, dst))
		again(t, ask(t, at(f, clients, 3, 5000), dst2))
		for name, list := range map[string]func() ([]Flow, error){
			"ListTo": func() ([]Flow, error) { return c.ListTo(service.UDP, one) },
			"the kernel alone": func() ([]Flow, error) {
				return c.dump(nil, f.Number(), wanted{protocol: service.UDP, from: one}, wanted{})
			},
		} {
			flows, err := list()
			if err != nil || len(flows) != 1 || flows[0].ReplySrc != one || flows[0].OrigDst != dst {
				t.Errorf("%s: %s: got %v, %v, want the flow to %s", f, name, flows, err, one)
			}
		}
		if flows, err := c.ListTo(service.TCP, one); err != nil || len(flows) != 0 {
			t.Errorf("%s: TCP: got %v, %v, want none", f, flows, err)
		}
	}
}
