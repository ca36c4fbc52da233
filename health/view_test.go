package health

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

func TestFill(t *testing.T) {
	d := StandardDefaults()
	full := func(k service.Check) service.HealthCheck {
		return service.HealthCheck{Kind: k, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	}
	off := service.HealthCheck{Kind: service.CheckOff}
	own := service.HealthCheck{Kind: service.CheckHTTP, Path: "/up", Port: 81, Interval: time.Minute, Timeout: time.Millisecond, Rise: 7, Fall: 9}
	tests := map[string]struct {
		defaults Defaults
		check    service.HealthCheck
		protocol service.Protocol
		want     service.HealthCheck
	}{
		"the default":              {d, service.HealthCheck{}, service.TCP, full(service.CheckTCP)},
		"no default for UDP":       {d, service.HealthCheck{}, service.UDP, off},
		"UDP that asks for it":     {d, service.HealthCheck{Kind: service.CheckUDP}, service.UDP, full(service.CheckUDP)},
		"off":                      {d, service.HealthCheck{Kind: service.CheckOff, Interval: time.Second}, service.TCP, off},
		"nothing is a default":     {Defaults{}, service.HealthCheck{}, service.TCP, off},
		"everything of one's own":  {d, own, service.TCP, own},
		"UDP port checked by HTTP": {d, service.HealthCheck{Kind: service.CheckHTTP}, service.UDP, full(service.CheckHTTP)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.defaults.Fill(tt.check, tt.protocol)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestViewOf(t *testing.T) {
	address := netip.MustParseAddrPort("10.0.0.1:80")
	d := StandardDefaults()
	plain := &service.Port{Key: service.Key{Name: "a", Protocol: service.TCP}}
	spelled := &service.Port{Key: service.Key{Name: "b", Protocol: service.TCP}, Health: d.Fill(plain.Health, service.TCP)}
	other := &service.Port{Key: service.Key{Name: "c", Protocol: service.TCP}, Health: service.HealthCheck{Kind: service.CheckHTTP}}
	var nobody *View
	down := State{Status: Down, Since: epoch}
	target := NewView(d, nil).Target(plain, address)
	v := NewView(d, map[Target]State{target: down})
	for name, tt := range map[string]struct {
		view *View
		port *service.Port
		want State
	}{
		"probed":              {v, plain, down},
		"probed alike":        {v, spelled, down},
		"probed another way":  {v, other, State{}},
		"nobody probes":       {nobody, plain, State{}},
		"view without states": {NewView(d, nil), plain, State{}},
	} {
		if diff := cmp.Diff(tt.want, tt.view.Of(tt.port, address)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if v.Defaults() != d {
		t.Errorf("defaults %v", v.Defaults())
	}
}
