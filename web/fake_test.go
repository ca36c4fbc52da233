package web

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// fakeSource is a proxy that holds what a test gives it.
type fakeSource struct {
	mu      sync.Mutex
	status  plan.Status
	conns   []plan.ConnectionStatus
	connErr error
	report  HealthReport
	pins    map[service.Key]service.Preference
	subs    map[chan plan.Event]bool
}

func (f *fakeSource) Status() plan.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status
}

func (f *fakeSource) Connections(context.Context) ([]plan.ConnectionStatus, error) {
	return f.conns, f.connErr
}

func (f *fakeSource) Subscribe() (<-chan plan.Event, func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ch := make(chan plan.Event, 16)
	if f.subs == nil {
		f.subs = map[chan plan.Event]bool{}
	}
	f.subs[ch] = true
	return ch, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.subs, ch)
	}
}

func (f *fakeSource) Drain(on bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.report.Drained = on
	return nil
}

func (f *fakeSource) Pin(k service.Key, p service.Preference) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if k.Name == "broken" {
		return errors.New("state directory is read-only")
	}
	if f.pins == nil {
		f.pins = map[service.Key]service.Preference{}
	}
	f.pins[k] = p
	return nil
}

func (f *fakeSource) Health() HealthReport { return f.report }

// Recent and Refused make it one that remembers clients.
func (f *fakeSource) Recent(k service.Key) (plan.Recent, error) {
	return plan.Recent{Ended: []plan.Ended{{Service: k.String() + "/" + k.Protocol.String(), Reset: true}}}, nil
}

func (f *fakeSource) Refused() []plan.Ended {
	return []plan.Ended{{Service: "shop/cart", Client: netip.MustParseAddrPort("10.0.0.7:4711"), Refused: "no endpoint can take it"}}
}

// send hands an event to every subscriber.
func (f *fakeSource) send(e plan.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for ch := range f.subs {
		ch <- e
	}
}

func (f *fakeSource) subscribers() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.subs)
}

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// shop is a proxy with a web shop: a service of two ports and one without name.
func shop() *fakeSource {
	port := func(name, port, protocol, address string, d plan.DataPlane, s plan.State) plan.ServiceStatus {
		return plan.ServiceStatus{
			Namespace: "shop", Name: name, Port: port, Protocol: protocol,
			Addresses: []netip.AddrPort{netip.MustParseAddrPort(address)},
			DataPlane: d, State: s, Reason: "carried <1> connection",
			Connections: plan.Connections{Active: 1, Total: 7, Failed: 2, Retried: 3, BytesIn: 100, BytesOut: 200},
			Endpoints: []plan.EndpointStatus{
				{Address: netip.MustParseAddrPort("10.2.0.2:8080"), Health: "up", Usable: true},
				{Address: netip.MustParseAddrPort("10.2.0.3:8080"), Health: "down"},
			},
		}
	}
	return &fakeSource{
		status: plan.Status{
			Version: "v0.1.0", Mode: plan.ModeIPTables, Node: "n1", UptimeSeconds: 42, Alive: true,
			Sync:         plan.SyncStatus{Generation: 5, LastSuccess: start, DurationSeconds: 0.25},
			Sources:      []plan.SourceStatus{{Name: "manifests", Synced: true, Error: "a.yaml:3: what\nb.yaml:9: what"}},
			Capabilities: []plan.Capability{{Name: "iptables", Supported: true}, {Name: "ipvs"}},
			Services: []plan.ServiceStatus{
				port("cart", "", "TCP", "10.96.0.9:6379", plan.Userspace, plan.StateQualifying),
				port("web", "http", "TCP", "10.96.0.10:80", plan.IPTables, plan.StateOffloaded),
				port("web", "http3", "UDP", "10.96.0.10:443", plan.Userspace, plan.StatePinned),
			},
		},
		conns: []plan.ConnectionStatus{
			{Service: "shop/web:http", Client: netip.MustParseAddrPort("10.0.0.7:4711")},
			{Service: "shop/web:http3", Client: netip.MustParseAddrPort("10.0.0.7:4712")},
			{Service: "shop/webmail", Client: netip.MustParseAddrPort("10.0.0.7:4713")},
		},
		report: HealthReport{LastUpdated: start, NodeEligible: true},
	}
}
