package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/strict"
	"kproxy.dev/kproxy/web"
)

// targetUsage is how the help spells a target.
const targetUsage = "NAMESPACE/NAME[:PORT] | ADDRESS:PORT[/PROTOCOL]"

// target names service ports as any command prints them: by name, by an address of
// theirs, or by an endpoint's.
type target struct {
	text      string
	namespace string
	name      string
	port      string // its name or number; empty for all
	address   netip.AddrPort
	nodePort  uint16            // of *:PORT
	protocol  *service.Protocol // nil for any
}

// parseTarget reads NAMESPACE/NAME, NAMESPACE/NAME:PORT, ADDRESS:PORT or *:PORT, the
// latter two with /tcp, /udp or /sctp or without.
func parseTarget(s string) (target, error) {
	t := target{text: s}
	address := s
	if i := strings.LastIndex(s, "/"); i >= 0 {
		if p, err := service.ParseProtocol(s[i+1:]); err == nil {
			address, t.protocol = s[:i], &p
		}
	}
	if port, ok := strings.CutPrefix(address, "*:"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		if err == nil && n > 0 {
			t.nodePort = uint16(n)
			return t, nil
		}
	}
	var err error
	if t.address, err = netip.ParseAddrPort(address); err == nil {
		return t, nil
	}
	namespace, rest, ok := strings.Cut(s, "/")
	name, port, _ := strings.Cut(rest, ":")
	if !ok || namespace == "" || name == "" || strings.Contains(rest, "/") || strings.ContainsFunc(s, unicode.IsControl) {
		return target{}, usageError("%q is neither NAMESPACE/NAME[:PORT] nor ADDRESS:PORT[/PROTOCOL], such as default/web:http, 10.96.0.10:53/udp or [fd00::10]:80", s)
	}
	return target{text: s, namespace: namespace, name: name, port: port}, nil
}

// oneTarget reads the argument of a command that takes one at most; nil for none.
func oneTarget(c *cli.Context) (*target, error) {
	switch c.NArg() {
	case 0:
		return nil, nil
	case 1:
		t, err := parseTarget(c.Args().First())
		return &t, err
	}
	return nil, usageError("%s takes one service at most, got %q", c.Command.Name, c.Args().Slice())
}

// selectFrom keeps the service ports that t names; all where t is nil. An address
// is a service's own before it is an endpoint's, and that before the node's.
func (t *target) selectFrom(all []plan.ServiceStatus) ([]plan.ServiceStatus, error) {
	if t == nil {
		return all, nil
	}
	for _, names := range []func(*plan.ServiceStatus) bool{t.isFrontend, t.isEndpoint, t.isNodePort} {
		var out []plan.ServiceStatus
		for i := range all {
			if names(&all[i]) && (t.protocol == nil || strings.EqualFold(all[i].Protocol, t.protocol.String())) {
				out = append(out, all[i])
			}
		}
		if len(out) > 0 {
			return out, nil
		}
	}
	var known []string
	for i := range all {
		known = append(known, all[i].Namespace+"/"+all[i].Name, all[i].Title())
	}
	slices.Sort(known)
	if t.name == "" {
		return nil, fmt.Errorf("no service has the address %s; kproxy status lists what there is", t.text)
	}
	return nil, fmt.Errorf("there is no service %s%s", t.text, strict.DidYouMean(t.text, known...))
}

// addresses returns the addresses of those service ports with protocol p that t names.
func (t *target) addresses(all []plan.ServiceStatus, p service.Protocol) ([]netip.AddrPort, error) {
	services, err := t.selectFrom(all)
	var out []netip.AddrPort
	for i := range services {
		if strings.EqualFold(services[i].Protocol, p.String()) {
			out = append(out, services[i].Addresses...)
		}
	}
	return out, err
}

// isFrontend reports whether s is named, or has the address.
func (t *target) isFrontend(s *plan.ServiceStatus) bool {
	if t.name == "" {
		return slices.Contains(s.Addresses, t.address)
	}
	return s.Namespace == t.namespace && s.Name == t.name && (t.port == "" || s.HasPort(t.port))
}

func (t *target) isNodePort(s *plan.ServiceStatus) bool {
	return s.NodePort != 0 && (t.nodePort == s.NodePort || t.address.Port() == s.NodePort)
}

func (t *target) isEndpoint(s *plan.ServiceStatus) bool {
	return t.address.IsValid() && slices.ContainsFunc(s.Endpoints, func(e plan.EndpointStatus) bool { return e.Address == t.address })
}

// lookUp asks kproxy which service ports t names.
func (t *target) lookUp(ctx context.Context, client *web.Client) ([]plan.ServiceStatus, error) {
	st, err := client.Status(ctx)
	if err != nil {
		return nil, err
	}
	return t.selectFrom(st.Services)
}

// connections lists those of the service ports that t names; all where t is nil.
func (t *target) connections(ctx context.Context, client *web.Client) ([]plan.ConnectionStatus, error) {
	if t == nil {
		return client.Connections(ctx, "")
	}
	if _, err := strconv.Atoi(t.port); t.name != "" && err != nil {
		return client.Connections(ctx, t.text)
	}
	services, err := t.lookUp(ctx, client)
	if err != nil {
		return nil, err
	}
	rows, err := client.Connections(ctx, "")
	return slices.DeleteFunc(rows, func(r plan.ConnectionStatus) bool {
		return !slices.ContainsFunc(services, func(s plan.ServiceStatus) bool {
			return r.Service == s.Title() && strings.EqualFold(r.Protocol, s.Protocol)
		})
	}), err
}
