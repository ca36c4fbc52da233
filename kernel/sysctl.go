package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Sysctl is a kernel setting that kproxy depends on.
type Sysctl struct {
	Name   string // "net.ipv4.ip_forward", or the path of a file
	Value  string
	Reason string
	// Advise only says so when the setting differs, because changing it may
	// surprise the host.
	Advise bool
	// AtLeast: a higher Value does as well, where it can't be set.
	AtLeast bool
	// Raise: a higher Value does as well, and is left alone.
	Raise bool
}

func (s *Sysctl) path() string {
	if filepath.IsAbs(s.Name) {
		return s.Name
	}
	return filepath.Join("/proc/sys", strings.ReplaceAll(s.Name, ".", "/"))
}

// is reports whether a setting's text is as it should be.
func (s *Sysctl) is(now string) bool {
	return now == s.Value || s.Raise && number(now) >= number(s.Value)
}

// Sysctls lists the settings. There are few on purpose: nothing here opens
// loopback to neighbours (route_localnet) or weakens conntrack.
func Sysctls() []Sysctl {
	// The kernel looks for a socket before it routes a packet, and drops a packet
	// to be forwarded for which it found one (ip_forward, ip6_forward). Userspace's
	// sockets towards endpoints bear clients' addresses, up to a minute longer
	// than their connection (TIME_WAIT): when a client happens to use the same
	// port for a connection that the kernel forwards to the same endpoint, the
	// endpoint's answers would vanish. The settings hold for IPv6 as well.
	const early = "a forwarded connection isn't taken for one of kproxy's own with the client's address"
	return []Sysctl{
		{Name: "net.ipv4.tcp_early_demux", Value: "0", Reason: early},
		{Name: "net.ipv4.udp_early_demux", Value: "0", Reason: early},
		// Of flows that begin from then on (Documentation/networking/nf_conntrack-sysctl.rst). Events are 2, the default
		// since Linux 5.19, for "when somebody listens".
		{Name: "net.netfilter.nf_conntrack_acct", Value: "1", Raise: true, Reason: "connections in the kernel's data planes are counted"},
		{Name: "net.netfilter.nf_conntrack_events", Value: "1", Raise: true, Reason: "the kernel tells of connections that end"},
		{Name: "net.ipv4.ip_forward", Value: "1", Reason: "connections of other hosts are forwarded to endpoints"},
		{Name: "net.ipv6.conf.all.forwarding", Value: "1", Advise: true,
			Reason: "IPv6 connections of other hosts are forwarded to endpoints; kproxy leaves it to you, because a host that gets its " +
				"default route from router advertisements loses it then, unless accept_ra is 2"},
	}
}

// SysctlReport is a setting that wasn't as it should be.
type SysctlReport struct {
	Sysctl
	Was     string
	Changed bool
	Err     error // why it could not be changed, where that isn't for this process to change
}

// String says in one line what was done, or should be.
func (r SysctlReport) String() string {
	switch {
	case r.Changed:
		return fmt.Sprintf("set %s to %s (was %s): %s", r.Name, r.Value, r.Was, r.Reason)
	case r.Err != nil:
		return fmt.Sprintf("%s is %s, %s is needed: %s; it can't be set here (%v): %s", r.Name, r.Was, r.Value, r.Reason, r.Err, SysctlRemedy(r.Name, r.Value))
	}
	return fmt.Sprintf("%s is %s, %s is needed: %s", r.Name, r.Was, r.Value, r.Reason)
}

// Unwritable reports whether err says that this process may not change the
// kernel's settings: /proc/sys is mounted read-only in containers that aren't
// privileged, or a security module guards it.
func Unwritable(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// SysctlRemedy says how to set what is Unwritable.
func SysctlRemedy(name, value string) string {
	set := fmt.Sprintf("sysctl -w %s=%s", name, value)
	if filepath.IsAbs(name) {
		set = fmt.Sprintf("echo %s > %s", value, name)
	}
	return "let a privileged container run kproxy run --init-only before, as deploy/ does, or set it on the node: " + set
}

// number returns the number that a setting's text is, -1 where that is none.
func number(s string) int {
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	return -1
}

// ReadSysctl reads a setting that is a number, in the network namespace of the calling thread; false
// where there is none. Parts aren't joined by dots, which names of interfaces may contain.
func ReadSysctl(parts ...string) (n int, ok bool) {
	b, err := os.ReadFile("/proc/sys/" + strings.Join(parts, "/"))
	if err != nil {
		return 0, false
	}
	n, err = strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

// WrongSysctls reports what isn't as it should be, in the network namespace of the calling thread, and sets nothing. Settings that
// this kernel doesn't have, or that can't be read, are passed over.
func WrongSysctls(settings []Sysctl) (out []SysctlReport) {
	for _, s := range settings {
		b, err := os.ReadFile(s.path())
		if was := strings.TrimSpace(string(b)); err == nil && !s.is(was) {
			out = append(out, SysctlReport{Sysctl: s, Was: was})
		}
	}
	return out
}

// EnsureSysctls sets what isn't as it should be, in the network namespace of
// the calling thread, reads it back, and reports it. Settings that this kernel doesn't have
// are passed over. Those that this process may not change are reported too: nobody is
// better off with a proxy that doesn't start.
func EnsureSysctls(settings []Sysctl) ([]SysctlReport, error) {
	var out []SysctlReport
	for _, s := range settings {
		b, err := os.ReadFile(s.path())
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return out, fmt.Errorf("read sysctl %s: %w", s.Name, err)
		}
		r := SysctlReport{Sysctl: s, Was: strings.TrimSpace(string(b))}
		if s.is(r.Was) {
			continue
		}
		if !s.Advise {
			err := os.WriteFile(s.path(), []byte(s.Value), 0o644)
			if Unwritable(err) || errors.Is(err, unix.EOPNOTSUPP) {
				if s.AtLeast && number(r.Was) >= number(s.Value) {
					continue
				}
				r.Err = err
				out = append(out, r)
				continue
			} else if err != nil {
				return out, fmt.Errorf("set sysctl %s to %s: %w", s.Name, s.Value, err)
			}
			if b, err = os.ReadFile(s.path()); err != nil {
				return out, fmt.Errorf("read sysctl %s: %w", s.Name, err)
			}
			if now := strings.TrimSpace(string(b)); !s.is(now) {
				return out, fmt.Errorf("set sysctl %s to %s: it is %s afterwards", s.Name, s.Value, now)
			}
			r.Changed = true
		}
		out = append(out, r)
	}
	return out, nil
}
