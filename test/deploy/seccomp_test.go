package deploy

import (
	"encoding/json"
	"os"
	"runtime"
	"slices"
	"testing"
)

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

// defaultSeccomp is what a runtime makes of its default profile for a container
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
