package deploy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// probe asks what the kubelet asks: on the node's own address, or in the container that was started last.
func (n *node) probe(ctx context.Context, p *core.Probe) error {
	if p.Exec != nil {
		if out, err := n.inContainer(ctx, "kproxy", p.Exec.Command...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", p.Exec.Command, err, out)
		}
		return nil
	}
	client := n.net.Node.HTTPClient(0) // ctx bounds it
	url := fmt.Sprintf("http://%s:%s%s", n.net.Config.NodeAddresses()[0], p.HTTPGet.Port.String(), p.HTTPGet.Path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", p.HTTPGet.Path, resp.Status)
	}
	return nil
}

// asBooted makes the node's settings what they are on a node that nobody has
// set up.
func (n *node) asBooted() {
	n.Helper()
	n.sysctl("ipv4/ip_forward", "0")
	n.sysctl("ipv4/tcp_early_demux", "1")
	n.sysctl("ipv4/udp_early_demux", "1")
	n.sysctl("netfilter/nf_conntrack_acct", "0")
}

// initialize runs the init container to its end.
func (n *node) initialize(edits ...edit) error {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, within(time.Minute))
	defer cancel()
	p := n.start("init", edits...)
	if err := p.Wait(ctx); err != nil {
		return fmt.Errorf("init container: %w:\n%s", err, p.Log())
	}
	return nil
}

// holdsRules makes a variant of iptables the one that holds the node's rules, by
// the chain that the kubelet leaves as a hint.
func (n *node) holdsRules(variant string) {
	n.Helper()
	for _, program := range []string{"iptables-" + variant, "ip6tables-" + variant} {
		if out, err := n.net.Node.Command(n.ctx, program, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT").CombinedOutput(); err != nil {
			n.Fatalf("%s: %v\n%s", program, err, out)
		}
	}
}

// asks exchanges with the service from the client, over both protocols and
// families, and checks that the endpoint sees the client's own address.
func (n *node) asks(m lab.Manifest) {
	n.Helper()
	for family, client := range n.net.Config.ClientAddresses(0) {
		for _, network := range []string{"tcp", "udp"} {
			ctx, cancel := context.WithTimeout(n.ctx, within(10*time.Second))
			a, err := n.net.Client.Ask(ctx, network, address(m, family), "hello")
			cancel()
			if err != nil {
				n.Fatalf("%s to %s: %v", network, address(m, family), err)
			}
			if a.Peer != client {
				n.Errorf("%s to %s: the endpoint saw %s, want the client's address %s", network, address(m, family), a.Peer, client)
			}
		}
	}
}

// TestServe: with the privileges of the DaemonSet kproxy can all it can as a
// privileged container, in every data plane of this host, and a pod that
// replaces another loses no connection. Beside a firewall of either variant that is not nftables.
func TestServe(t *testing.T) {
	for _, tt := range []struct {
		variant  string
		firewall bool
	}{{"nft", false}, {"nft", true}, {"legacy", true}} {
		variant := tt.variant
		t.Run(fmt.Sprintf("%s, firewall %v", variant, tt.firewall), func(t *testing.T) {
			n := newNode(t)
			n.holdsRules(variant)
			if tt.firewall {
				n.must(n.net.Node.Command(n.ctx, "iptables-"+variant, "-P", "FORWARD", "DROP").Run())
			}
			n.asBooted()
			m := service(n)
			n.must(m.Write(n.manifestDir()))

			n.must(n.initialize())
			first := n.start("kproxy")
			n.ready(first)
			if log := first.Log(); strings.Contains(log, "not permitted") {
				t.Errorf("after the init container something is left to set:\n%s", log)
			}
			n.asks(m)
			if st := n.exec("kproxy", program, "status"); !strings.Contains(st, "web") {
				t.Errorf("kproxy status in the container says:\n%s", st)
			}
			capabilities := n.capabilities()
			plane := plan.NFTables
			if tt.firewall {
				if c := capabilities["iptables"]; !c.Supported || !strings.Contains(c.Reason, variant) {
					t.Errorf("kproxy works with %q, want the variant that has the node's rules, %s", c.Reason, variant)
				}
				if plane = plan.IPTables; capabilities["ipvs"].Supported {
					plane = plan.IPVS
				}
			}
			n.carriedBy("web", plane)
			n.asks(m)

			n.replace(first, m, plane)
			if diff := cmp.Diff(n.privileged(), capabilities); diff != "" {
				t.Errorf("what kproxy can do (-as a privileged container +as deployed):\n%s", diff)
			}
			n.cleanUp(variant)
		})
	}
}

// TestServeWithoutPrograms: in mode nftables the image without iptables and ipset does,
// with fewer privileges, as the component mode-nftables has it.
func TestServeWithoutPrograms(t *testing.T) {
	n := newNode(t)
	var mode edit
	for _, p := range kustomize(t, folder+"/components/mode-nftables").Patches {
		if !strings.HasPrefix(p.Patch, "- op:") {
			n.must(n.deploy.patch(p.Patch))
			continue
		}
		var ops []struct{ Value string }
		n.must(yaml.Unmarshal([]byte(p.Patch), &ops))
		mode = func(b *bundle) { b.Process.Args = append(b.Process.Args, ops[0].Value) } // both containers have the same: TestKustomizations
	}
	c, err := n.deploy.container("kproxy")
	n.must(err)
	if diff := cmp.Diff([]core.Capability{"NET_ADMIN"}, c.SecurityContext.Capabilities.Add); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
	bare := t.TempDir()
	n.must(errors.Join(os.Chmod(bare, 0o755), asBuilt(folder+"/rootfs.sh", bare, "nftables"), run("cp", n.image+program, bare+program)))
	n.image = bare
	n.asBooted()
	m := service(n)
	n.must(m.Write(n.manifestDir()))
	n.must(n.initialize(mode))
	first := n.start("kproxy", mode)
	n.ready(first)
	if log := first.Log(); strings.Contains(log, "not permitted") {
		t.Errorf("after the init container something is left to set:\n%s", log)
	}
	n.asks(m)
	n.carriedBy("web", plan.NFTables)
	n.asks(m)
	n.crash(first)
	n.carriedBy("web", plan.NFTables)
	n.asks(m)
	n.replace(first, m, plan.NFTables, mode)
	n.cleanUp("nft")
}

// replace updates the pod while clients go on: the second one takes over from the first, which idles until it is deleted.
func (n *node) replace(first *lab.Process, m lab.Manifest, plane plan.DataPlane, edits ...edit) {
	n.Helper()
	traffic, err := lab.StartTraffic(n.ctx, lab.TrafficConfig{From: n.net.Client, Target: address(m, 0), Network: "tcp", Rate: 50, Count: 5000, Concurrency: 1024, Timeout: within(30 * time.Second)})
	n.must(err)
	grace := time.Duration(*n.deploy.daemonSet.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
	held, err := lab.Hold(n.ctx, lab.HoldConfig{From: n.net.Client, Network: "tcp", Target: address(m, 0), Timeout: within(30 * time.Second)})
	n.must(err)
	second := n.start("kproxy", edits...)
	n.ready(second)
	if log := second.Log(); !first.Running() || !strings.Contains(log, "took over") {
		n.Errorf("the second one is ready; the first one runs: %v; the second one's log:\n%s", first.Running(), log)
	}
	n.must(first.Stop(within(30 * time.Second))) // it has nothing to drain
	n.carriedBy("web", plane)
	if err := held.Close(); err != nil {
		n.Errorf("a connection broke while the pod was replaced: %v", err)
	}
	results := traffic.Stop()
	if failed := results.Failed(); len(results) == 0 || len(failed) > 0 {
		n.Errorf("%d of %d connections failed while the pod was replaced:\n%s", len(failed), len(results), failed)
	}
	n.asks(m)
	n.must(second.Stop(within(grace)))
}

// capabilities returns what kproxy says it can do, by name.
func (n *node) capabilities() map[string]plan.Capability {
	n.Helper()
	st, err := n.client.Status(n.ctx)
	n.must(err)
	out := map[string]plan.Capability{}
	for _, c := range st.Capabilities {
		out[c.Name] = c
	}
	return out
}

// privileged are the capabilities of kproxy in a privileged container.
func (n *node) privileged() map[string]plan.Capability {
	n.Helper()
	c, err := n.deploy.container("init")
	n.must(err)
	all := n.bundleOf(c)
	p := n.start("kproxy", func(b *bundle) {
		b.Process.Capabilities, b.Linux = all.Process.Capabilities, linux{Namespaces: b.Linux.Namespaces, CgroupsPath: b.Linux.CgroupsPath}
	})
	n.ready(p)
	out := n.capabilities()
	n.must(p.Stop(within(time.Minute)))
	return out
}

// cleanUp runs kproxy cleanup with the privileges of the DaemonSet, as who goes
// back to kube-proxy does, and checks that nothing of it is left.
func (n *node) cleanUp(variant string) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, within(time.Minute))
	defer cancel()
	p := n.start("kproxy", func(b *bundle) { b.Process.Args = []string{program, "cleanup"} })
	if err := p.Wait(ctx); err != nil {
		n.Fatalf("kproxy cleanup: %v\n%s", err, p.Log())
	}
	for _, show := range []string{"iptables-" + variant + "-save", "ip6tables-" + variant + "-save", "ipset list -name", "ip link", "ip rule"} {
		words := strings.Fields(show)
		out, err := n.net.Node.Command(n.ctx, words[0], words[1:]...).CombinedOutput()
		if text := strings.ToLower(string(out)); err != nil || strings.Contains(text, "kproxy") || strings.Contains(text, "lookup 10249") {
			n.Errorf("after kproxy cleanup, %s: %v\n%s", show, err, out)
		}
	}
}

// TestEachCapabilityIsNeeded: without one of them kproxy doesn't run, and says
// what it lacks.
func TestEachCapabilityIsNeeded(t *testing.T) {
	tests := []struct {
		variant, without, want string
	}{
		{"nft", "CAP_NET_ADMIN", "CAP_NET_ADMIN"},
		{"legacy", "CAP_NET_ADMIN", "CAP_NET_ADMIN"},
		{"legacy", "CAP_NET_RAW", "CAP_NET_RAW"},
	}
	for _, tt := range tests {
		t.Run(tt.variant+" without "+tt.without, func(t *testing.T) {
			n := newNode(t)
			n.holdsRules(tt.variant)
			n.must(service(n).Write(n.manifestDir()))
			p := n.start("kproxy", without(tt.without))
			ctx, cancel := context.WithTimeout(n.ctx, within(20*time.Second))
			defer cancel()
			err := p.Wait(ctx)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(p.Log(), tt.want) {
				t.Errorf("it ended with %v, want exit status 3 and a word about %s:\n%s", err, tt.want, p.Log())
			}
		})
	}
}

// TestWithoutInit: where the init container has not run, kproxy serves all the
// same and says what is wrong and what to do; and the init container without
// privileges fails.
func TestWithoutInit(t *testing.T) {
	n := newNode(t)
	n.asBooted()
	m := service(n)
	n.must(m.Write(n.manifestDir()))
	c, err := n.deploy.container("kproxy")
	n.must(err)
	main := n.bundleOf(c)
	weak := func(b *bundle) { b.Process.Capabilities, b.Linux = main.Process.Capabilities, main.Linux }
	if err := n.initialize(weak); err == nil || !strings.Contains(err.Error(), "privileged container") {
		t.Errorf("an init container that isn't privileged ended with %v, want an error that says so", err)
	}

	p := n.start("kproxy")
	n.ready(p)
	have := n.capabilities()
	// Accounting is on by now: the kernel turns it on itself for a rule that counts
	// bytes (connbytes_mt_check).
	for _, name := range []string{"sysctl net.ipv4.ip_forward", "sysctl net.ipv4.tcp_early_demux"} {
		if c := have[name]; c.Supported || !strings.Contains(c.Reason, "--init-only") || !strings.Contains(c.Reason, "sysctl -w") {
			t.Errorf("status says of %s: %+v, want that it isn't set, and the remedy", name, c)
		}
	}
	n.asks(m) // in userspace, which needs no forwarding
}

// bundle is the part of the OCI runtime specification's config.json that a
// container of the DaemonSet needs.
type bundle struct {
	OCIVersion string   `json:"ociVersion"`
	Process    process  `json:"process"`
	Root       rootfs   `json:"root"`
	Mounts     []ociMnt `json:"mounts"`
	Linux      linux    `json:"linux"`
}

type process struct {
	User            struct{ UID, GID uint32 } `json:"user"`
	Args            []string                  `json:"args"`
	Env             []string                  `json:"env"`
	Cwd             string                    `json:"cwd"`
	Capabilities    map[string][]string       `json:"capabilities"`
	NoNewPrivileges bool                      `json:"noNewPrivileges"`
}

type rootfs struct {
	Path     string `json:"path"`
	Readonly bool   `json:"readonly"`
}

type ociMnt struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options"`
}

type linux struct {
	Namespaces    []map[string]string `json:"namespaces"`
	CgroupsPath   string              `json:"cgroupsPath"`
	Seccomp       *seccomp            `json:"seccomp,omitempty"`
	MaskedPaths   []string            `json:"maskedPaths,omitempty"`
	ReadonlyPaths []string            `json:"readonlyPaths,omitempty"`
}

// What the kubelet and container runtimes give every container that isn't
// privileged (defaultMaskedPaths and defaultReadonlyPaths in the Kubernetes
// documentation of procMount).
var (
	maskedPaths = []string{
		"/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
		"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// capabilityNames are in the order of their numbers (linux/capability.h).
var capabilityNames = strings.Fields(`CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID
	CAP_KILL CAP_SETGID CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE CAP_NET_BIND_SERVICE CAP_NET_BROADCAST CAP_NET_ADMIN
	CAP_NET_RAW CAP_IPC_LOCK CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_SYS_PACCT
	CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_MKNOD CAP_LEASE
	CAP_AUDIT_WRITE CAP_AUDIT_CONTROL CAP_SETFCAP CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG CAP_WAKE_ALARM
	CAP_BLOCK_SUSPEND CAP_AUDIT_READ CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE`)

// allCapabilities returns the capabilities of a privileged container: all that this
// process can give.
func allCapabilities() []string {
	var out []string
	for number, name := range capabilityNames {
		if have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0); err == nil && have == 1 {
			out = append(out, name)
		}
	}
	return out
}

// capabilitiesOf returns the capabilities that a runtime gives a container that drops
// all and adds some, or is privileged.
func capabilitiesOf(t *testing.T, c *core.Container) []string {
	t.Helper()
	s := c.SecurityContext
	if s.Privileged != nil && *s.Privileged {
		return allCapabilities()
	}
	if len(s.Capabilities.Drop) != 1 || s.Capabilities.Drop[0] != "ALL" {
		t.Fatalf("container %s drops %v: it has the runtime's default capabilities then, which differ", c.Name, s.Capabilities.Drop)
	}
	var out []string
	for _, name := range s.Capabilities.Add {
		out = append(out, "CAP_"+string(name))
	}
	return out
}

// bundleOf returns the bundle that a runtime makes of a container of the DaemonSet.
func (n *node) bundleOf(c *core.Container) *bundle {
	n.Helper()
	privileged := c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
	capabilities := capabilitiesOf(n.T, c)
	b := &bundle{
		OCIVersion: "1.0.2",
		Process: process{
			Args: n.expand(append(append([]string{}, c.Command...), c.Args...)),
			Env:  n.environment(c), Cwd: "/",
			Capabilities:    map[string][]string{"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
			NoNewPrivileges: c.SecurityContext.AllowPrivilegeEscalation != nil && !*c.SecurityContext.AllowPrivilegeEscalation,
		},
		Root:   rootfs{Path: n.image, Readonly: *c.SecurityContext.ReadOnlyRootFilesystem},
		Mounts: systemMounts(privileged),
		Linux: linux{
			// No network namespace: with hostNetwork it is the node's, which is that of
			// whoever starts the runtime.
			Namespaces: []map[string]string{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}},
		},
	}
	for _, m := range c.VolumeMounts {
		options := []string{"rbind", "rprivate", map[bool]string{true: "ro", false: "rw"}[m.ReadOnly]}
		b.Mounts = append(b.Mounts, ociMnt{m.MountPath, "bind", n.source(m.Name), options})
	}
	if !privileged {
		b.Linux.MaskedPaths, b.Linux.ReadonlyPaths = maskedPaths, readonlyPaths
		if p := n.deploy.daemonSet.Spec.Template.Spec.SecurityContext.SeccompProfile; p.Type == core.SeccompProfileTypeRuntimeDefault {
			b.Linux.Seccomp = defaultSeccomp(n.T, capabilities)
		}
	}
	return b
}

// systemMounts returns what every container has mounted, as containerd does it.
func systemMounts(privileged bool) []ociMnt {
	sys := []string{"nosuid", "noexec", "nodev", "ro"}
	if privileged {
		sys[3] = "rw"
	}
	return []ociMnt{
		{"/proc", "proc", "proc", []string{"nosuid", "noexec", "nodev"}},
		{"/dev", "tmpfs", "tmpfs", []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{"/dev/pts", "devpts", "devpts", []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{"/dev/shm", "tmpfs", "shm", []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{"/dev/mqueue", "mqueue", "mqueue", []string{"nosuid", "noexec", "nodev"}},
		{"/sys", "sysfs", "sysfs", sys},
	}
}

// expand replaces $(NODE_NAME), as the kubelet does.
func (n *node) expand(words []string) []string {
	for i := range words {
		words[i] = strings.ReplaceAll(words[i], "$(NODE_NAME)", nodeName)
	}
	return words
}

// environment is that of the image and of the container, without what the
// kubelet adds about services.
func (n *node) environment(c *core.Container) []string {
	n.Helper()
	var out []string
	for _, line := range dockerfile(n.T) {
		if rest, ok := strings.CutPrefix(line, "ENV "); ok {
			out = append(out, rest)
		}
	}
	for _, e := range c.Env {
		switch {
		case e.ValueFrom == nil:
			out = append(out, e.Name+"="+e.Value)
		case e.ValueFrom.FieldRef.FieldPath == "spec.nodeName":
			out = append(out, e.Name+"="+nodeName)
		default:
			n.Fatalf("environment %s of container %s isn't known here", e.Name, c.Name)
		}
	}
	return out
}

// source returns where the node has a volume, and makes it as its type says.
func (n *node) source(name string) string {
	n.Helper()
	v, err := n.deploy.volume(name)
	n.must(err)
	if v.ConfigMap != nil {
		return n.configMap()
	}
	path := n.host(v.HostPath.Path)
	switch *v.HostPath.Type {
	case core.HostPathDirectoryOrCreate:
		n.must(makeDirectory(path))
	case core.HostPathFileOrCreate:
		n.must(makeDirectory(filepath.Dir(path)))
		n.must(touch(path))
	default:
		n.Fatal(fmt.Errorf("volume %s has type %s, which isn't known here", name, *v.HostPath.Type))
	}
	return path
}

// profilePath is the seccomp profile of podman and CRI-O, in the Debian package
// golang-github-containers-common. Like containerd's it comes from Docker's.
const profilePath = "/usr/share/containers/seccomp.json"

// profile is the format of profilePath, and of Docker's.
type profile struct {
	DefaultAction   string `json:"defaultAction"`
	DefaultErrnoRet *uint  `json:"defaultErrnoRet"`
	ArchMap         []struct {
		Architecture     string   `json:"architecture"`
		SubArchitectures []string `json:"subArchitectures"`
	} `json:"archMap"`
	Syscalls []struct {
		seccompRule
		Includes conditions `json:"includes"`
		Excludes conditions `json:"excludes"`
	} `json:"syscalls"`
}

// conditions tell when a rule is in force.
type conditions struct {
	Caps   []string `json:"caps"`
	Arches []string `json:"arches"`
}

// seccomp is linux.seccomp of the OCI runtime specification.
type seccomp struct {
	DefaultAction   string        `json:"defaultAction"`
	DefaultErrnoRet *uint         `json:"defaultErrnoRet,omitempty"`
	Architectures   []string      `json:"architectures"`
	Syscalls        []seccompRule `json:"syscalls"`
}

type seccompRule struct {
	Names    []string          `json:"names"`
	Action   string            `json:"action"`
	ErrnoRet *uint             `json:"errnoRet,omitempty"`
	Args     []json.RawMessage `json:"args,omitempty"`
}

// defaultSeccomp returns what a runtime makes of its default profile for a container
// with these capabilities.
func defaultSeccomp(t *testing.T, capabilities []string) *seccomp {
	t.Helper()
	text, err := os.ReadFile(profilePath)
	if err != nil {
		t.Skipf("needs the Debian package golang-github-containers-common: %v", err)
	}
	var p profile
	if err := json.Unmarshal(text, &p); err != nil {
		t.Fatalf("%s: %v", profilePath, err)
	}
	out := &seccomp{DefaultAction: p.DefaultAction, DefaultErrnoRet: p.DefaultErrnoRet}
	mine := map[string]string{"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}[runtime.GOARCH]
	for _, a := range p.ArchMap {
		if a.Architecture == mine {
			out.Architectures = append([]string{a.Architecture}, a.SubArchitectures...)
		}
	}
	for _, rule := range p.Syscalls {
		have := func(c string) bool { return slices.Contains(capabilities, c) }
		switch in, ex := rule.Includes, rule.Excludes; {
		case len(in.Arches) > 0 && !slices.Contains(in.Arches, runtime.GOARCH),
			slices.Contains(ex.Arches, runtime.GOARCH),
			slices.ContainsFunc(in.Caps, func(c string) bool { return !have(c) }),
			slices.ContainsFunc(ex.Caps, have):
			continue
		}
		out.Syscalls = append(out.Syscalls, rule.seccompRule)
	}
	return out
}
