package iptables_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// inUserspace programs a service at virtual(1), TCP and UDP, that a live kproxy serves.
func (s *scene) inUserspace(mode plan.Mode) {
	s.T.Helper()
	var services []*plan.Service
	for _, proto := range []service.Protocol{service.TCP, service.UDP} {
		services = append(services, kerneltest.Service("web", proto, kerneltest.Cluster(s.Virtual(1)), kerneltest.NodePort(30080), s.Endpoints(2), kerneltest.InUserspace))
	}
	if mode == plan.ModeUserspace {
		for _, x := range services {
			x.Kernel = plan.None
		}
	}
	s.program(kerneltest.Plan(mode, services...))
	s.alive()
}

// unnumber takes the addresses away from the node's end of a host's link, as
// Calico, AWS VPC CNI and others lay their pods out.
func (s *scene) unnumber(host int) {
	s.T.Helper()
	link := fmt.Sprintf("host%d", host)
	run(s.T, "ip addr flush dev "+link+" scope global")
	run(s.T, fmt.Sprintf("ip route add %s dev %s", s.Address(s.Family, host), link))
	if s.Family == service.IPv4 {
		for path, value := range map[string]string{"conf/" + link + "/proxy_arp": "1", "neigh/" + link + "/proxy_delay": "0"} {
			if err := os.WriteFile("/proc/sys/net/ipv4/"+path, []byte(value), 0o644); err != nil {
				s.T.Fatal(err)
			}
		}
		s.On(host, func() {
			run(s.T, "ip route add 169.254.1.1 dev eth0 scope link; ip route replace default via 169.254.1.1 dev eth0")
		})
		return
	}
	var own string
	for _, word := range strings.Fields(run(s.T, "ip -6 -o addr show dev "+link+" scope link")) {
		if strings.HasPrefix(word, "fe80") {
			own, _, _ = strings.Cut(word, "/")
		}
	}
	s.On(host, func() { run(s.T, "ip -6 route replace default via "+own+" dev eth0") })
}

// TestUserspaceIsReachedFromUnnumberedLinks: an interface without an address, or with a
// link-local one only, leads to userspace as any other does.
func TestUserspaceIsReachedFromUnnumberedLinks(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		for _, l := range []uint16{options().TCPPort, options().UDPPort} {
			s.Serve(0, "userspace", l)
		}
		s.inUserspace(plan.ModeIPTables)
		s.unnumber(1)
		for _, proto := range []service.Protocol{service.TCP, service.UDP} {
			s.Expect(proto.String(), map[string]int{"userspace": 2}, s.Asks(2, 1, proto, s.Virtual(1)))
			s.Expect(proto.String()+" from the node", map[string]int{"userspace": 1}, s.Asks(1, 0, proto, s.Virtual(1)))
			nodePort := netip.AddrPortFrom(s.NodeAddress(s.Family, 2), 30080).String()
			s.Expect(proto.String()+" by node port", map[string]int{"userspace": 1}, s.Asks(1, 1, proto, nodePort))
		}
	})
}

// TestAnswersPassSourceValidation: whatever the kernel checks of a source address,
// with marks or without, answers reach the sockets that bear a client's address.
func TestAnswersPassSourceValidation(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.Serve(0, "node", 8080)
		s.program(kerneltest.Plan(plan.ModeIPTables))
		for _, filter := range []string{"0", "1", "2"} {
			for _, valid := range []string{"0", "1"} {
				for name, value := range map[string]string{"rp_filter": filter, "src_valid_mark": valid} {
					for _, link := range []string{"all", "host1", "host2"} {
						if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+link+"/"+name, []byte(value), 0o644); err != nil {
							s.T.Fatal(err)
						}
					}
				}
				for _, proto := range []service.Protocol{service.TCP, service.UDP} {
					for want, to := range map[string]netip.Addr{"two": s.Address(s.Family, 2), "node": s.NodeAddress(s.Family, 3)} {
						what := fmt.Sprintf("rp_filter=%s src_valid_mark=%s, %s", filter, valid, proto)
						s.Expect(what, want+" "+s.Address(s.Family, 1).String(), s.answerAs(1, proto, netip.AddrPortFrom(to, 8080)))
					}
				}
			}
		}
	})
}

// TestOwnSocketsMayHaveTheListenersPort: a socket towards an endpoint that has a client's
// address and, by chance, the listener's port gets its answers.
func TestOwnSocketsMayHaveTheListenersPort(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.program(kerneltest.Plan(plan.ModeIPTables))
		client := s.Address(s.Family, 1)
		for proto, port := range map[service.Protocol]uint16{service.TCP: options().TCPPort, service.UDP: options().UDPPort} {
			c, err := dialFrom(netip.AddrPortFrom(client, port), proto, netip.AddrPortFrom(s.Address(s.Family, 2), 8080))
			s.Expect(proto.String(), "two "+client.String(), firstAnswer(c, err))
		}
	})
}

// answerAs returns what an endpoint answers when kproxy connects to it with a host's
// address, or the error.
func (s *scene) answerAs(host int, proto service.Protocol, to netip.AddrPort) string {
	c, err := dialAs(s.Address(s.Family, host), proto, to)
	return firstAnswer(c, err)
}

func firstAnswer(c net.Conn, err error) string {
	if err != nil {
		return err.Error()
	}
	got, err := answer(c)
	if err != nil {
		return err.Error()
	}
	return got
}

// TestUnservedAreRefused: without a live kproxy and with nothing beneath, a service in
// userspace refuses at once, and nothing of it leaves by the default route. While
// only rules are missing, clients are to try again.
func TestUnservedAreRefused(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		run(s.T, fmt.Sprintf("ip route replace default via %s", s.Address(s.Family, 4)))
		firewall := s.variant.Program[s.Family]
		s.On(4, func() {
			run(s.T, fmt.Sprintf("%s -t raw -A PREROUTING -d %s -j DROP", firewall, netip.MustParseAddrPort(s.Virtual(1)).Addr()))
		})
		s.inUserspace(plan.ModeUserspace)
		asks := func(what string, want error) {
			s.T.Helper()
			fails := func(what string, from int, proto service.Protocol) {
				if want == kerneltest.ErrTimeout {
					s.Unanswered(what, from, proto, s.Virtual(1))
				} else {
					s.Expect(what, map[string]int{want.Error(): 1}, s.Asks(1, from, proto, s.Virtual(1)))
				}
			}
			for _, proto := range []service.Protocol{service.TCP, service.UDP} {
				fails(what+": "+proto.String(), 1, proto)
			}
			fails(what+": from the node", 0, service.TCP)
			// What OUTPUT refuses or drops, the sender hears of at once.
			if _, _, err := s.Ask(0, service.UDP, netip.MustParseAddrPort(s.Virtual(1)), true); !errors.Is(err, unix.EPERM) {
				s.T.Errorf("%s: udp from the node: %v, want %v", what, err, unix.EPERM)
			}
		}
		if err := (&steering.Redirects{Store: s.sets}).Dead(); err != nil {
			s.T.Fatal(err)
		}
		asks("no live kproxy", kerneltest.ErrRefused)
		if c, err := s.backend.Counts(s.T.Context()); err != nil || c.Refused < 4 {
			s.T.Errorf("counts %+v, %v; want four refusals", c, err)
		}
		if err := (&steering.Redirects{Store: s.sets}).Starting(time.Hour); err != nil {
			s.T.Fatal(err)
		}
		asks("kproxy starts", kerneltest.ErrTimeout)
		if err := (&steering.Redirects{Store: s.sets}).Started(); err != nil {
			s.T.Fatal(err)
		}
		asks("no kproxy came", kerneltest.ErrRefused)
		s.alive()
		run(s.T, firewall+" -t nat -F KPROXY-PORTAL")
		asks("no rules", kerneltest.ErrTimeout)
		s.On(4, func() {
			if out := run(s.T, firewall+" -t raw -nvxL PREROUTING"); !strings.Contains(out, "       0        0 DROP") {
				s.T.Errorf("packets left by the default route:\n%s", out)
			}
		})
	})
}
