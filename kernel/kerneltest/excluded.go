package kerneltest

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// excludedNumber makes the addresses of the service of another proxy.
const excludedNumber = 77

// echoPort is where connections are answered line by line, to stay open.
const echoPort = 8081

// excluded: a service whose endpoints another proxy serves is that proxy's, for
// every client at every address, its source ranges included; and it moves
// there and back with every connection that it has.
func (m Packets) excluded(t *testing.T) {
	s := newStage(t, m, flowScene{policy: pods})
	s.Serve(three, "three", echoPort+1)
	s.echo(t, three)
	for _, f := range service.Families {
		for _, p := range []service.Protocol{service.TCP, service.UDP} {
			s.anotherProxy(t, f, p)
		}
	}
	s.replan(t, true)
	for _, f := range service.Families { // on this thread, which is in the scene's namespace
		for _, p := range []service.Protocol{service.TCP, service.UDP} {
			s.compareExcluded(t, f, p)
		}
		s.moves(t, f)
	}
}

// other is the service: whom it is to admit is left to its own proxy.
func (s *stage) other() offer {
	return offer{name: "other", number: excludedNumber, change: func(p *service.Port) {
		p.SourceRanges = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:113::/48")}
	}}
}

// anotherProxy makes rules of another proxy for it, as simple as can be: port 80
// leads to an endpoint that answers line by line, and the node port to one that
// answers once.
func (s *stage) anotherProxy(t *testing.T, f service.Family, p service.Protocol) {
	t.Helper()
	o := s.other()
	var places []string
	for _, k := range []plan.Kind{plan.ClusterIP, plan.ExternalIP, plan.LoadBalancer} {
		places = append(places, fmt.Sprintf("-d %s -p %s --dport %d", o.at(k, f, s.Network, 0).Addr(), p, port))
	}
	places = append(places, fmt.Sprintf("-p %s --dport %d -m addrtype --dst-type LOCAL", p, o.nodePort()))
	to := netip.AddrPortFrom(s.Address(f, three), echoPort)
	if p == service.UDP {
		to = netip.AddrPortFrom(to.Addr(), echoPort+1)
	}
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		for _, at := range places {
			script := fmt.Sprintf("%s -w -t nat -A %s %s -j DNAT --to-destination %s", s.packets.Firewall[f], chain, at, to)
			if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", script, err, out)
			}
		}
	}
}

// replan programs the scene's services and the other one, which is another
// proxy's or not.
func (s *stage) replan(t *testing.T, excluded bool) {
	t.Helper()
	var b service.Builder
	b.SetNode(service.Node{Name: here, Addresses: s.nodeAddresses()})
	for _, o := range offers(s.Network) {
		o.addTo(t, &b, s.Network)
	}
	for _, p := range []service.Protocol{service.TCP, service.UDP} {
		o := s.other()
		if err := b.AddPort(o.port(p, s.Network)); err != nil {
			t.Fatal(err)
		}
		for _, f := range service.Families {
			b.AddEndpoint(o.key(p), service.Endpoint{Address: netip.AddrPortFrom(s.Address(f, three), echoPort), Node: "elsewhere", Ready: true, Serving: true, Weight: 1})
		}
	}
	policy := s.plan.Policy
	policy.ExcludeCIDRs = nil
	if excluded {
		for _, f := range service.Families {
			policy.ExcludeCIDRs = append(policy.ExcludeCIDRs, netip.PrefixFrom(s.Address(f, three), f.Bits()))
		}
	}
	before := kernel.Portal(s.plan)
	s.plan = Compute(s.packets.Plane, policy, b.Build())
	for _, svc := range s.plan.Services {
		if svc.DataPlane == plan.Userspace {
			svc.DataPlane = svc.Beneath
		}
	}
	if _, err := kernel.ApplySets(context.Background(), s.sets, kernel.DiffSets(before, kernel.Portal(s.plan))); err != nil {
		t.Fatal(err)
	}
	s.packets.bring(t, System{Backend: s.backend}, s.packets.Render(s.plan))
}

// compareExcluded asks from everywhere.
func (s *stage) compareExcluded(t *testing.T, f service.Family, p service.Protocol) {
	t.Helper()
	o := s.other()
	for _, client := range clients {
		for _, k := range []plan.Kind{plan.ClusterIP, plan.ExternalIP, plan.LoadBalancer, plan.NodePort} {
			to := o.at(k, f, s.Network, client)
			want := "three:" + hostNames[client]
			if got := s.askOther(t, client, f, p, to); got != want {
				t.Errorf("%s %s to the %s (%s): %s, want %s", hostNames[client], p, k, to, got, want)
			}
		}
	}
}

// askOther asks once.
func (s *stage) askOther(t *testing.T, client int, f service.Family, p service.Protocol, to netip.AddrPort) string {
	t.Helper()
	if p == service.UDP {
		return s.ask(f, p, cell{client: client, to: to}, 1)
	}
	c := s.open(t, client, to)
	if c == nil {
		return "no connection"
	}
	defer c.Close()
	return s.say(c, f)
}

// moves: connections go on while the service becomes kproxy's and another
// proxy's again, and new ones are whose the service is.
func (s *stage) moves(t *testing.T, f service.Family) {
	t.Helper()
	to := s.other().at(plan.ExternalIP, f, s.Network, outside)
	const theirs, ours = "three:outside", "three:node" // kproxy masquerades
	var held []net.Conn
	var seen []string
	check := func(when, want string) {
		t.Helper()
		c := s.open(t, outside, to)
		if c == nil {
			t.Fatalf("%s: no connection", when)
		}
		held, seen = append(held, c), append(seen, want)
		for i, c := range held {
			if got := s.say(c, f); got != seen[i] {
				t.Errorf("%s, %s connection %d: %s, want %s", when, f, i+1, got, seen[i])
			}
		}
	}
	check("another proxy's", theirs)
	s.replan(t, false)
	check("kproxy's", ours)
	s.replan(t, true)
	check("another proxy's again", theirs)
	for _, c := range held {
		c.Close()
	}
}

// open connects from a host, nil if nobody answers.
func (s *stage) open(t *testing.T, client int, to netip.AddrPort) net.Conn {
	t.Helper()
	var c net.Conn
	s.On(client, func() {
		var err error
		if c, err = net.DialTimeout("tcp", to.String(), askTimeout); err != nil {
			c = nil
		}
	})
	return c
}

// say sends a line and returns who answers, and whom they see.
func (s *stage) say(c net.Conn, f service.Family) string {
	_ = c.SetDeadline(time.Now().Add(askTimeout))
	if _, err := fmt.Fprintln(c, "?"); err != nil {
		return err.Error()
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	server, client, _ := strings.Cut(strings.TrimSpace(line), " ")
	return server + ":" + s.nameOf(f, client)
}

// echo answers every line of a connection with the host's name and the client's
// address, in both families.
func (s *stage) echo(t *testing.T, host int) {
	t.Helper()
	s.On(host, func() {
		for _, network := range []string{"tcp4", "tcp6"} {
			l, err := net.Listen(network, fmt.Sprintf(":%d", echoPort))
			s.must(err)
			t.Cleanup(func() { l.Close() })
			go func() {
				for c, err := l.Accept(); err == nil; c, err = l.Accept() {
					go answerLines(c, hostNames[host])
				}
			}()
		}
	})
}

func answerLines(c net.Conn, name string) {
	defer c.Close()
	in := bufio.NewScanner(c)
	for in.Scan() {
		if _, err := fmt.Fprintf(c, "%s %s\n", name, hostOf(c.RemoteAddr())); err != nil {
			return
		}
	}
}
