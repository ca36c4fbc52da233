package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Packets is a kernel mode in the kernel itself.
type Packets struct {
	Mode
	// OnKernel returns a backend for the network namespace of the calling thread,
	// and the sets of the portal. The namespace is ready for the mode.
	OnKernel func(t *testing.T) (kernel.Backend, kernel.SetStore)
	// Firewall are the programs that change the host's own rules, per family.
	Firewall [2]string
	// Listeners are the ports of the shared listener, TCP and UDP.
	Listeners [2]uint16
}

// Flows sends packets of every kind of client to every kind of address, and
// compares who answers and whom the endpoints see with one table, which is the
// same for every mode.
func Flows(t *testing.T, m Packets) {
	for _, sc := range flowScenes() {
		t.Run(sc.name, func(t *testing.T) {
			s := newStage(t, m, sc)
			for _, f := range service.Families {
				for _, p := range sc.protocols(t, m) {
					t.Run(f.String()+" "+p.String(), func(t *testing.T) { s.compare(t, sc, f, p) })
				}
			}
		})
	}
	t.Run("endpoints are chosen", func(t *testing.T) { m.choices(t) })
	t.Run("another proxy's services", func(t *testing.T) { m.excluded(t) })
	t.Run("the node's own ports stay its own", func(t *testing.T) { m.ports(t) })
}

// protocols are those of a scene. Kernels that have IPVS have SCTP; where iptables
// is tested, it may be missing.
func (sc flowScene) protocols(t *testing.T, m Packets) []service.Protocol {
	t.Helper()
	out := []service.Protocol{service.TCP, service.UDP}
	if !sc.sctp {
		return out
	}
	if err := hasSCTP(); err == nil {
		out = append(out, service.SCTP)
	} else if m.Plane == plan.IPVS {
		t.Errorf("SCTP goes untested: %v", err)
	}
	return out
}

// stage is a network whose node has been programmed.
type stage struct {
	*Network
	packets Packets
	plan    *plan.Plan
	backend kernel.Backend
	sets    kernel.SetStore
	offers  map[string]offer
}

func newStage(t *testing.T, m Packets, sc flowScene) *stage {
	t.Helper()
	s := &stage{Network: NewNetwork(t, hosts), packets: m, offers: map[string]offer{}}
	s.sysctl("ipv4/icmp_ratelimit", "0") // or some clients wouldn't hear that they are refused
	s.sysctl("ipv6/icmp/ratelimit", "0")
	s.watchGateway()
	for _, i := range []int{two, three} {
		s.Serve(i, hostNames[i], 8080)
		if sc.sctp && hasSCTP() == nil {
			s.On(i, func() {
				for _, f := range service.Families {
					s.serveSCTP(hostNames[i], netip.AddrPortFrom(s.Address(f, i), 8080))
				}
			})
		}
	}
	for _, l := range m.Listeners {
		s.Serve(node, "userspace", l)
	}
	if sc.firewall {
		s.dropAll(t)
	}
	for _, o := range offers(s.Network) {
		s.offers[o.name] = o
	}
	policy := plan.DefaultPolicy()
	sc.policy(s.Network, &policy)
	s.plan = offloaded(t, m.Mode, policy, s.Network)
	s.backend, s.sets = m.OnKernel(t)
	m.bring(t, System{Backend: s.backend}, m.Render(s.plan))
	ctx := context.Background()
	portal := kernel.DiffSets(kernel.PortalSetsOf(s.plan), kernel.Portal(s.plan))
	if _, err := kernel.ApplySets(ctx, s.sets, portal); err != nil {
		t.Fatal(err)
	}
	if sc.dead {
		return s
	}
	if err := kernel.RefreshAlive(s.sets, time.Hour); err != nil {
		t.Fatal(err)
	}
	return s
}

// dropAll makes the host one that lets nothing through by itself but the answers
// to what it asked, and neighbour discovery.
func (s *stage) dropAll(t *testing.T) {
	for f, program := range s.packets.Firewall {
		script := fmt.Sprintf("%[1]s -P INPUT DROP; %[1]s -P FORWARD DROP; %[1]s -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", program)
		if service.Family(f) == service.IPv6 {
			script += fmt.Sprintf("; %s -A INPUT -p icmpv6 -j ACCEPT", program)
		}
		if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
}

// cell is one client at one address.
type cell struct {
	what   string
	client int
	to     netip.AddrPort
	want   string
}

func (s *stage) compare(t *testing.T, sc flowScene, f service.Family, p service.Protocol) {
	t.Helper()
	var cells []cell
	for _, r := range sc.rows {
		o := s.offers[r.offer]
		for i, client := range clients {
			cells = append(cells, cell{
				what: fmt.Sprintf("%s to the %s of %q", hostNames[client], r.kind, r.offer), client: client, to: o.at(r.kind, f, s.Network, client),
				want: s.expect(sc, r, f, p, i),
			})
		}
	}
	got := s.askAll(f, p, cells)
	for i, c := range cells {
		if got[i] != c.want {
			t.Errorf("%s (%s): %s, want %s", c.what, c.to, got[i], c.want)
		}
	}
}

// expect is what the i-th client gets in this mode.
func (s *stage) expect(sc flowScene, r row, f service.Family, p service.Protocol, i int) string {
	o, want := s.offers[r.offer], r.expect[i]
	svc := s.plan.Find(o.key(p))
	if svc.Beneath == plan.IPVS && svc.Port.ExternalLocal && r.kind != plan.ClusterIP {
		// IPVS can't tell clients apart. A live kproxy serves those that a short
		// circuit is for, but not over SCTP.
		switch {
		case sc.dead || p == service.SCTP:
			want = alone[r.offer][i]
		case want != refused && s.short(f, clients[i]): // unless no node port answers there
			want = "userspace"
		}
	}
	if p == service.SCTP && (want == refused || want == silence) {
		return nobody // SCTP doesn't heed ICMP, and sets of node ports don't know it
	}
	return want
}

// short reports whether a short circuit is for a client.
func (s *stage) short(f service.Family, client int) bool {
	return client == node || s.plan.Policy.IsPod(s.client(f, client))
}

// askAll asks for every cell: those that should get no answer all at once,
// because that takes time, the others one after the other, so that endpoints
// take turns.
func (s *stage) askAll(f service.Family, p service.Protocol, cells []cell) []string {
	out := make([]string, len(cells))
	var wait sync.WaitGroup
	for i, c := range cells {
		if c.want == silence || c.want == nobody {
			wait.Go(func() { out[i] = s.ask(f, p, c, 1) })
		}
	}
	wait.Wait()
	for i, c := range cells {
		switch {
		case c.want == refused:
			out[i] = s.ask(f, p, c, 1) // the kernel sends so many of those at a time (net.ipv4.icmp_msgs_burst)
		case out[i] == "":
			out[i] = s.ask(f, p, c, 4)
		}
		turnedAway := c.want == refused || c.want == silence || c.want == nobody
		if turnedAway && (out[i] == kept || c.want == nobody && slices.Contains([]string{refused, silence, lost}, out[i])) {
			out[i] = c.want
		}
	}
	return out
}

// ask asks a few times and says who answered, and whom they saw.
func (s *stage) ask(f service.Family, p service.Protocol, c cell, times int) string {
	got := map[string]bool{}
	for range times {
		server, client, err := s.Apart(c.client, p, c.to)
		switch {
		case errors.Is(err, ErrRefused):
			got[refused] = true
		case errors.Is(err, ErrTimeout):
			got[silence] = true
		case errors.Is(err, unix.EPERM):
			got[kept] = true
		case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
			got[lost] = true
		case err != nil:
			got[err.Error()] = true
		case server == "userspace":
			got[server] = true
		default:
			got[server+":"+s.nameOf(f, client)] = true
		}
	}
	names := slices.Sorted(maps.Keys(got))
	if len(names) == 2 && strings.HasPrefix(names[0], "three:") {
		slices.Reverse(names)
	}
	return strings.Join(names, " ")
}

// nameOf names the host that has an address; an address that nobody has is itself.
func (s *stage) nameOf(f service.Family, address string) string {
	for i := 1; i <= hosts; i++ {
		switch address {
		case s.Address(f, i).String():
			return hostNames[i]
		case s.NodeAddress(f, i).String():
			return hostNames[node]
		}
	}
	return address
}

// choices: how many connections each endpoint gets.
func (m Packets) choices(t *testing.T) {
	s := newStage(t, m, flowScene{policy: pods})
	for _, f := range service.Families {
		for _, p := range []service.Protocol{service.TCP, service.UDP} {
			count := func(name string, k plan.Kind, n int) map[string]int {
				out := map[string]int{}
				for range n {
					server, _, err := s.Apart(outside, p, s.offers[name].at(k, f, s.Network, outside))
					if err != nil {
						server = err.Error()
					}
					out[server]++
				}
				return out
			}
			for _, k := range []plan.Kind{plan.ClusterIP, plan.NodePort} {
				exactly := func(what, name string, want map[string]int) {
					// A packet that is sent once more (ARP, a busy machine) may take a turn of
					// its own; a split that is wrong is so each time.
					for try := 1; ; try++ {
						diff := gocmp.Diff(want, count(name, k, 12))
						if diff == "" {
							return
						}
						if try == 3 {
							t.Errorf("%s, %s %s %s, %d times (-want +got):\n%s", what, f, p, k, try, diff)
							return
						}
					}
				}
				exactly("round robin", "both", map[string]int{"two": 6, "three": 6})
				exactly("weights 3 and 1", "weighted", map[string]int{"two": 9, "three": 3})
				if got := count("sticky", k, 6); len(got) != 1 || got["two"]+got["three"] != 6 {
					t.Errorf("one client's connections, %s %s %s: %v", f, p, k, got)
				}
			}
		}
	}
}

// ports: what listens on the node isn't reached through a service address.
func (m Packets) ports(t *testing.T) {
	s := newStage(t, m, flowScene{policy: pods})
	s.Serve(node, "host", 9999)
	for _, f := range service.Families {
		for _, p := range []service.Protocol{service.TCP, service.UDP} {
			var cells []cell
			for _, client := range clients {
				for _, k := range []plan.Kind{plan.ClusterIP, plan.ExternalIP, plan.LoadBalancer} {
					to := netip.AddrPortFrom(s.offers["both"].at(k, f, s.Network, client).Addr(), 9999)
					cells = append(cells, cell{client: client, to: to, want: nobody})
				}
				cells = append(cells, cell{client: client, to: netip.AddrPortFrom(s.NodeAddress(f, max(client, 1)), 9999), want: "host:" + hostNames[client]})
			}
			for i, got := range s.askAll(f, p, cells) {
				if got != cells[i].want {
					t.Errorf("%s to %s %s: %s, want %s", hostNames[cells[i].client], p, cells[i].to, got, cells[i].want)
				}
			}
		}
	}
}
