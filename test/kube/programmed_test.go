package kube

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"kproxy.dev/kproxy/plan"
)

// programmed prints all that kproxy has programmed on the node, in a form in
// which equal states are equal texts: chains by name, their rules in order, sets
// without the sizes and ages that the kernel chooses.
func (w *world) programmed() string {
	w.Helper()
	var out []string
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		text := w.node(save)
		table := ""
		var lines []string
		for line := range strings.Lines(text) {
			line = counters.ReplaceAllString(strings.TrimSpace(line), "")
			if name, ok := strings.CutPrefix(line, "*"); ok {
				table = name
			}
			if strings.Contains(line, "KPROXY") {
				lines = append(lines, save+" "+table+" "+line)
			}
		}
		slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(chain(a), chain(b)) })
		out = append(out, lines...)
	}
	var sets []string
	for line := range strings.Lines(w.node("ipset", "save")) {
		if !memories.MatchString(line) {
			sets = append(sets, ages.ReplaceAllString(strings.TrimSpace(line), ""))
		}
	}
	slices.Sort(sets)
	if w.mode == plan.ModeIPVS {
		out = append(out, sortedLines(w.node("ipvsadm", "-S", "-n"))...)
		out = append(out, sortedLines(w.node("ip", "-o", "-br", "address", "show", "dev", "kproxy0"))...)
	}
	return strings.Join(append(out, sets...), "\n")
}

func sortedLines(text string) []string {
	return slices.Sorted(strings.Lines(text))
}

var (
	counters = regexp.MustCompile(` ?\[\d+:\d+\]`)
	// Which endpoint a client has, and which of its connections userspace carries,
	// is what has happened and not what is programmed.
	memories = regexp.MustCompile(`^add KPROXY-(AFF|HELD)-`)
	ages     = regexp.MustCompile(` (hashsize|initval|timeout|bucketsize) \w+`)
)

// chain is the first four words of a line: save, table, command, chain.
func chain(line string) string {
	words := strings.SplitN(line, " ", 5)
	return strings.Join(words[:min(4, len(words))], " ")
}

// wanted says what the status must show for what the API holds now, a line per
// service port: its cluster IPs, its node port and the endpoints that are used.
func (w *world) wanted() ([]string, error) {
	services, err := w.client.core.Services("").List(w.ctx, metav1.ListOptions{
		LabelSelector: "!service.kubernetes.io/service-proxy-name",
	})
	if err != nil {
		return nil, err
	}
	endpoints, err := w.client.discovery.EndpointSlices("").List(w.ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	usable := map[string][]string{}
	for _, s := range endpoints.Items {
		for _, e := range s.Endpoints {
			for _, p := range s.Ports {
				key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName] + ":" + *p.Name
				usable[key] = append(usable[key], netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String())
			}
		}
	}
	var out []string
	for _, s := range services.Items {
		if s.Spec.ClusterIP == corev1.ClusterIPNone || s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		for _, p := range s.Spec.Ports {
			var addresses []string
			for _, ip := range s.Spec.ClusterIPs {
				addresses = append(addresses, netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(p.Port)).String())
			}
			key := s.Namespace + "/" + s.Name + ":" + p.Name
			out = append(out, describe(key, addresses, uint16(p.NodePort), usable[key]))
		}
	}
	slices.Sort(out)
	return out, nil
}

// shown is the status in the form of wanted.
func shown(st plan.Status) []string {
	var out []string
	for _, s := range st.Services {
		var addresses, usable []string
		for _, a := range s.Addresses {
			addresses = append(addresses, a.String())
		}
		for _, e := range s.Endpoints {
			if e.Usable {
				usable = append(usable, e.Address.String())
			}
		}
		out = append(out, describe(s.Namespace+"/"+s.Name+":"+s.Port, addresses, s.NodePort, usable))
	}
	slices.Sort(out)
	return out
}

func describe(key string, addresses []string, nodePort uint16, endpoints []string) string {
	slices.Sort(addresses)
	slices.Sort(endpoints)
	return fmt.Sprintf("%s %v %d -> %v", key, addresses, nodePort, endpoints)
}
