package ipvs_test

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestProbe(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	// Where upstream tries its own schedulers as well.
	foreign := virtual(service.TCP, "198.51.100.0:20000")
	h.must(change(h.table, ipvs.Add, foreign))
	left := foreign // by a kproxy that was killed
	left.Address, left.Persistence = virtual(service.TCP, "198.51.100.0:20005").Address, 10249
	h.must(change(h.table, ipvs.Add, left))
	c, schedulers, err := ipvs.Probe(context.Background(), []string{"rr", "wrr", "wlc", "sh", "mh", "nosuch"})
	if err != nil || !c.Supported {
		t.Fatalf("Probe = %+v, %v", c, err)
	}
	for _, name := range []string{"rr", "wrr", "wlc", "sh", "mh"} {
		if why, tried := schedulers[name]; !tried || why != "" {
			t.Errorf("scheduler %s: %q", name, why)
		}
	}
	if schedulers["nosuch"] == "" {
		t.Error("a scheduler that there isn't works")
	}
	h.expect("table", "tcp 198.51.100.0:20000", h.servers())
	h.expect("link", "no link", h.addresses())
	if text := run(t, "ip -o link"); strings.Contains(text, "kproxy") {
		t.Errorf("a link is left:\n%s", text)
	}
}

// TestProbeSchedulers on a model, which lacks one.
func TestProbeSchedulers(t *testing.T) {
	h := kerneltest.NewHost()
	h.LackScheduler("mh")
	foreign := virtual(service.TCP, "198.51.100.0:20000")
	if err := h.AddForeignVirtual(foreign); err != nil {
		t.Fatal(err)
	}
	before := list(t, h.Table())
	got, err := ipvs.ProbeSchedulers(context.Background(), h.Table(), []string{"rr", "mh", "nosuch"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"rr": "", "mh": "module ip_vs_mh", "nosuch": "module ip_vs_nosuch"} {
		if why, tried := got[name]; !tried || (why == "") != (want == "") || !strings.Contains(why, want) {
			t.Errorf("scheduler %s: %q", name, why)
		}
	}
	if diff := cmp.Diff(len(before), len(list(t, h.Table()))); diff != "" {
		t.Errorf("virtual servers (-before +after):\n%s", diff)
	}
}

// TestSchedulerBesideEndingNamespaces: to load a scheduler's module while namespaces with IPVS are removed holds up neither.
func TestSchedulerBesideEndingNamespaces(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	for round := range 5 {
		for _, module := range []string{"ip_vs_lblcr", "ip_vs_lblc"} {
			_ = exec.Command("rmmod", module).Run() // it may not be there yet
		}
		var ending sync.WaitGroup
		for i := range 6 {
			ns := fmt.Sprintf("ends-%d", i)
			run(t, "ip netns add "+ns)
			t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() }) // where the test ends before
			run(t, "ip netns exec "+ns+" ipvsadm -A -t 10.0.0.1:80 -s rr")
			ending.Go(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
		}
		time.Sleep(time.Duration(round) * 10 * time.Millisecond)
		done := make(chan error, 1)
		go func() {
			_, err := ipvs.ProbeSchedulers(t.Context(), h.table, []string{"lblc", "lblcr"})
			done <- err
		}()
		select {
		case err := <-done:
			h.must(err)
		case <-time.After(time.Minute):
			t.Fatal("the kernel waits for itself") // and for this process's end
		}
		ending.Wait()
	}
}

func TestTimeouts(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	h := newHost(t)
	before, err := h.table.SetTimeouts(ipvs.Timeouts{})
	h.must(err)
	got, err := h.table.SetTimeouts(ipvs.Timeouts{TCP: 5 * 24 * time.Hour, UDP: 3 * time.Minute})
	h.must(err)
	if want := (ipvs.Timeouts{TCP: 5 * 24 * time.Hour, TCPFin: before.TCPFin, UDP: 3 * time.Minute}); got != want {
		t.Errorf("time-outs %+v, want %+v", got, want)
	}
	h.expect("ipvsadm", "Timeout (tcp tcpfin udp): 432000 120 180", strings.TrimSpace(run(t, "ipvsadm -L --timeout")))
}

func TestSysctls(t *testing.T) {
	for release, want := range map[string]string{
		"6.1.0-56-amd64": "1", "5.9.0": "1", "5.10-rc1": "1", "5.8.18": "0", "4.19.0-27-amd64": "0", "nonsense": "1", "5": "1", "5.4-arch": "0",
	} {
		found := false
		for _, s := range ipvs.Sysctls(release, false) {
			if s.Reason == "" || strings.Contains(s.Name, "arp") {
				t.Errorf("%s: %+v", release, s)
			}
			if s.Name == "net.ipv4.vs.conn_reuse_mode" {
				found = true
				if s.Value != want {
					t.Errorf("%s: conn_reuse_mode %s, want %s", release, s.Value, want)
				}
			}
		}
		if !found {
			t.Errorf("%s: no conn_reuse_mode", release)
		}
	}
	if plain, strict := ipvs.Sysctls("6.1.0", false), ipvs.Sysctls("6.1.0", true); len(strict) != len(plain)+2 {
		t.Errorf("strict ARP adds %d settings", len(strict)-len(plain))
	}
}

// TestSysctlsOfKernel: the kernel has every setting, and takes it.
func TestSysctlsOfKernel(t *testing.T) {
	kerneltest.Namespace(t)
	needsIPVS(t)
	newHost(t)
	release, err := kernel.Release()
	if err != nil {
		t.Fatal(err)
	}
	settings := ipvs.Sysctls(release, true)
	if _, err := kernel.EnsureSysctls(settings); err != nil {
		t.Fatal(err)
	}
	for _, s := range settings {
		if got := strings.TrimSpace(run(t, "sysctl -n "+s.Name)); got != s.Value {
			t.Errorf("%s is %s, want %s", s.Name, got, s.Value)
		}
	}
}
