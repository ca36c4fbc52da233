package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/lab/lesson"
	"kproxy.dev/kproxy/plan"
)

// TestTourFits: on a terminal of 80 columns and 24 lines, each step is there to its last word, with
// what it waits for and the service that it is about.
func TestTourFits(t *testing.T) {
	endpoint := func(s string) plan.EndpointStatus {
		return plan.EndpointStatus{Address: netip.MustParseAddrPort(s), Health: "up", Usable: true, Weight: 1}
	}
	st := plan.Status{Version: "v1", Alive: true}
	for _, port := range []string{"line", "datagram", "http"} {
		st.Services = append(st.Services, plan.ServiceStatus{
			Namespace: "default", Name: "web", Port: port, Protocol: "TCP", DataPlane: plan.NFTables, State: plan.StateOffloaded,
			Endpoints: []plan.EndpointStatus{endpoint("10.2.0.2:9000"), endpoint("10.2.0.3:9000"), endpoint("10.2.0.4:9000")},
		})
	}
	for name, tour := range map[string]tour{
		"iptables":  {Mode: plan.ModeIPTables, Fallback: plan.IPTables},
		"ipvs":      {Mode: plan.ModeIPVS, Fallback: plan.IPVS, Servers: onNode("ipvsadm -Ln")},
		"nftables":  {Mode: plan.ModeNFTables, Fallback: plan.NFTables, Tables: true},
		"userspace": {Mode: plan.ModeUserspace},
	} {
		tour.Self, tour.Manifest, tour.Backends, tour.Alive, tour.Dashboard = "/usr/local/bin/kproxy", labDir+"/manifests/web.yaml", 3, 3*time.Second, "http://198.18.0.2:10249/"
		tasks, err := lesson.Tour(tour)
		if err != nil {
			t.Fatal(err)
		}
		g := newGuide(shell{}, tasks)
		m := screen.New(screen.Config{Endpoints: true, Guide: g.views(), Note: func() string { return "the client's last second" }})
		m.Update(st, time.Now())
		for i, step := range g.views() {
			m.Guide(i, screen.StepState{Said: "something to happen"})
			m.Event(plan.Event{Message: "something"})
			screen := strings.Join(m.Render(time.Now(), 80, 24), "\n")
			words := strings.Fields(step.Look)
			for _, want := range append([]string{step.Title, "waiting: something to happen", words[len(words)-1], "default/web:line"}, strings.Fields(strings.Join(step.Commands, " "))...) {
				if !strings.Contains(strings.ReplaceAll(screen, " \\\n  ", ""), want) {
					t.Errorf("%s: step %d without %q:\n%s", name, i+1, want, screen)
				}
			}
			m.Key("n", time.Now())
		}
	}
}
