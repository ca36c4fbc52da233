package health

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

// standard are the defaults of the flags.
var standard = Defaults{Kind: service.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}

func TestFill(t *testing.T) {
	d := standard
	full := func(k service.Check) service.HealthCheck {
		return service.HealthCheck{Kind: k, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	}
	off := service.HealthCheck{Kind: service.CheckOff}
	own := service.HealthCheck{Kind: service.CheckHTTP, Path: "/up", Port: 81, Interval: time.Minute, Timeout: time.Millisecond, Rise: 7, Fall: 9}
	every := func(interval time.Duration) service.HealthCheck {
		c := full(service.CheckTCP)
		c.Interval = interval
		return c
	}
	bounded, quick, only := d, d, d
	bounded.MinInterval, only.Only = time.Second, true
	quick.MinInterval, quick.Interval = time.Second, 300*time.Millisecond
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
		"as often as is allowed":   {bounded, service.HealthCheck{Interval: time.Second}, service.TCP, every(time.Second)},
		"more often":               {bounded, service.HealthCheck{Interval: time.Millisecond}, service.TCP, every(time.Second)},
		"as often as the default":  {quick, service.HealthCheck{Interval: time.Millisecond}, service.TCP, every(300 * time.Millisecond)},
		"nothing of one's own":     {only, own, service.TCP, full(service.CheckTCP)},
		"nothing at all":           {only, off, service.TCP, off},
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

// TestRefused: what is asked for and not done is said.
func TestRefused(t *testing.T) {
	bounded, only := standard, standard
	bounded.MinInterval, only.Only = time.Second, true
	tooOften := []string{"its health checks are 1s apart, not 1ms as it asks: that is the least on this node (--health-min-interval)"}
	ignored := []string{"its annotations on health checks have no effect: this node ignores them (--health-annotations)"}
	for _, tt := range []struct {
		defaults Defaults
		check    service.HealthCheck
		want     []string
	}{
		{bounded, service.HealthCheck{}, nil},
		{bounded, service.HealthCheck{Interval: time.Second}, nil},
		{bounded, service.HealthCheck{Interval: time.Millisecond}, tooOften},
		{bounded, service.HealthCheck{Kind: service.CheckOff, Interval: time.Millisecond}, nil},
		{only, service.HealthCheck{}, nil},
		{only, service.HealthCheck{Kind: service.CheckOff}, nil},
		{only, service.HealthCheck{Kind: service.CheckTCP}, ignored},
		{only, service.HealthCheck{Fall: 1}, ignored},
	} {
		if diff := cmp.Diff(tt.want, tt.defaults.Refused(tt.check)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.check, diff)
		}
	}
}

func TestViewOf(t *testing.T) {
	address := netip.MustParseAddrPort("10.0.0.1:80")
	d := standard
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
