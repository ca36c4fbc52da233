package deploy

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
)

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

// allCapabilities are those of a privileged container: all that this process
// can give.
func allCapabilities() []string {
	var out []string
	for number, name := range capabilityNames {
		if have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0); err == nil && have == 1 {
			out = append(out, name)
		}
	}
	return out
}

// capabilitiesOf are what a runtime gives a container that drops all and adds
// some, or is privileged.
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

// bundleOf is what a runtime makes of a container of the DaemonSet.
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

// systemMounts are what every container has, as containerd mounts it.
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

// source is where the node has a volume; it is made as its type says.
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
