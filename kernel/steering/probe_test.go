package steering_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestProbeOfThisHost(t *testing.T) {
	kerneltest.Namespace(t)
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	defer sets.Close()
	const accounting = "/proc/sys/net/netfilter/nf_conntrack_acct"
	before, err := os.ReadFile(accounting)
	if err != nil {
		t.Fatal(err)
	}
	h, err := steering.NewProber(sets).Probe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range h.Caps.All {
		t.Logf("%-30s %-5t %s", c.Name, c.Supported, c.Reason)
		if !c.Supported {
			t.Errorf("%s isn't supported: %s", c.Name, c.Reason)
		}
	}
	if err := h.Missing(); err != nil || !h.Rules.Supported || !h.IPv6 || !h.RandomFully || !h.SocketMatch {
		t.Errorf("Probe = %+v, missing %v", h, err)
	}
	if left, _ := sets.List(nil); len(left) > 0 {
		t.Errorf("sets left behind: %v", left)
	}
	if after, err := os.ReadFile(accounting); err != nil || string(after) != string(before) {
		t.Errorf("conntrack's accounting was %q and is %q (%v)", before, after, err)
	}
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
		text, _ := exec.Command(v.Program[0] + "-save").Output()
		if s := string(text); kernelOwn(s) {
			t.Errorf("chains left behind:\n%s", s)
		}
	}
}

func kernelOwn(s string) bool { return strings.Contains(s, kernel.Prefix) }

// lacking is a host on which some rules are refused and some programs missing.
type lacking struct {
	kernel.Exec
	refuses string // rules that contain this
	without string // programs whose name contains this
}

func (l lacking) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	if l.without != "" && strings.Contains(program, l.without) {
		return nil, &kernel.ExecError{Program: program, Status: -1, Stderr: "not in PATH", Kind: kernel.ErrNoProgram}
	}
	if l.refuses != "" && strings.Contains(string(stdin), l.refuses) {
		return nil, &kernel.ExecError{Program: program, Status: 2, Stderr: "Couldn't load match", Line: 3, Kind: kernel.ErrSyntax}
	}
	return l.Exec.Run(ctx, stdin, program, args...)
}

func TestProbeSaysWhatIsMissing(t *testing.T) {
	admin := func() (uint64, error) { return 1<<12 | 1<<13, nil } // CAP_NET_ADMIN, CAP_NET_RAW
	tests := []struct {
		name         string
		refuses      string
		without      string
		capabilities func() (uint64, error)
		noSets       bool
		missing      string // in the error of Missing; empty: nothing is
		iptables     bool   // the mode works
		check        func(h *steering.Host) bool
	}{
		{name: "nothing", iptables: true, check: func(h *steering.Host) bool { return h.IPv6 && h.RandomFully && h.SocketMatch }},
		{name: "privilege", capabilities: func() (uint64, error) { return 0, nil }, missing: "CAP_NET_ADMIN"},
		{name: "raw sockets", capabilities: func() (uint64, error) { return 1 << 12, nil }, missing: "CAP_NET_RAW"},
		{name: "iptables", without: "tables", missing: "install the Debian package iptables"},
		{name: "ipset", noSets: true, missing: "CONFIG_IP_SET"},
		{name: "set match", refuses: "--match-set", missing: "CONFIG_NETFILTER_XT_SET"},
		{name: "DNAT", refuses: "DNAT", missing: "CONFIG_NETFILTER_XT_NAT"},
		{name: "statistic", refuses: "statistic", check: func(h *steering.Host) bool {
			return strings.Contains(h.Rules.Reason, "CONFIG_NETFILTER_XT_MATCH_STATISTIC")
		}},
		{name: "random-fully", refuses: "--random-fully", iptables: true, check: func(h *steering.Host) bool { return !h.RandomFully && h.SocketMatch }},
		{name: "socket match", refuses: "-m socket", iptables: true, check: func(h *steering.Host) bool { return h.RandomFully && !h.SocketMatch }},
		{name: "ip6tables", without: "ip6tables", iptables: true, check: func(h *steering.Host) bool { return !h.IPv6 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kerneltest.Namespace(t)
			sets, err := kernel.OpenIPSets()
			if err != nil {
				t.Fatal(err)
			}
			defer sets.Close()
			p := &steering.Prober{
				Runner: lacking{refuses: tt.refuses, without: tt.without}, Capabilities: tt.capabilities,
				OpenSets: func() (kernel.SetStore, error) { return sets, nil },
			}
			if p.Capabilities == nil {
				p.Capabilities = admin
			}
			if tt.noSets {
				p.OpenSets = func() (kernel.SetStore, error) { return nil, errors.New("protocol not supported") }
			}
			h, err := p.Probe(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			err = h.Missing()
			var missing *kernel.Missing
			switch {
			case tt.missing == "" && err != nil:
				t.Errorf("Missing = %v, want nothing", err)
			case tt.missing != "" && (!errors.As(err, &missing) || !strings.Contains(err.Error(), tt.missing)):
				t.Errorf("Missing = %v, want it to say %q", err, tt.missing)
			}
			if h.Rules.Supported != tt.iptables || !tt.iptables && h.Rules.Reason == "" {
				t.Errorf("iptables = %+v, want supported: %t", h.Rules, tt.iptables)
			}
			if tt.check != nil && !tt.check(h) {
				t.Errorf("Probe = %+v", h)
			}
			for _, c := range h.Caps.All {
				if c.Reason == "" {
					t.Errorf("%s has no reason", c.Name)
				}
			}
		})
	}
}

func TestFindVariant(t *testing.T) {
	tests := []struct {
		name        string
		nft, legacy string // what is there
		want        string
	}{
		{"nothing anywhere", "", "", "nft"}, // this machine's iptables
		{"more rules in legacy", "-t filter -A INPUT -j ACCEPT", "-t filter -A INPUT -j ACCEPT; iptables-legacy -t filter -A INPUT -j ACCEPT", "legacy"},
		{"the kubelet's hint in nft", "-t mangle -N KUBE-IPTABLES-HINT", "-t filter -A INPUT -j ACCEPT; iptables-legacy -t filter -A INPUT -j ACCEPT", "nft"},
		{"the kubelet's hint in legacy", "-t filter -A INPUT -j ACCEPT", "-t mangle -N KUBE-KUBELET-CANARY", "legacy"},
		{"kproxy's own chains", "-t filter -A INPUT -j ACCEPT", "-t nat -N KPROXY-SERVICES", "legacy"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kerneltest.Namespace(t)
			for program, args := range map[string]string{"iptables-nft": tt.nft, "iptables-legacy": tt.legacy} {
				if args == "" {
					continue
				}
				if out, err := exec.Command("sh", "-ec", program+" "+args).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			if tt.name == "nothing anywhere" {
				out, _ := exec.Command("iptables", "--version").Output()
				if strings.Contains(string(out), "legacy") {
					tt.want = "legacy"
				}
			}
			v, c := (&steering.Prober{Runner: kernel.Exec{}}).FindVariant(context.Background())
			if v.Name != tt.want || !c.Supported {
				t.Errorf("FindVariant = %s (%s), want %s", v.Name, c.Reason, tt.want)
			}
		})
	}
}
