package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// Network is a node between hosts, each in a namespace of its own. The test is
// on the node. Host i has addresses 10.<i>.0.2 and fd00:<i>::2 on its link eth0, the
// node's on the same link, host<i>, end in 1, and it is the host's default route.
type Network struct {
	t     testing.TB
	hosts []*lab.Namespace // the node first
}

// NewNetwork builds a network with hosts 1 to n.
func NewNetwork(t testing.TB, n int) *Network {
	t.Helper()
	at := Namespace(t)
	net := &Network{t: t, hosts: []*lab.Namespace{lab.FromFD("node", int(at))}}
	net.must(net.hosts[0].Prepare(true, true))
	for i := 1; i <= n; i++ {
		fd, err := netns.New() // and moves there
		net.must(err)
		net.must(netns.Set(at))
		t.Cleanup(func() { fd.Close() })
		name := fmt.Sprintf("host%d", i)
		host := lab.FromFD(name, int(fd))
		net.must(host.Prepare(false, true))
		net.must(lab.Join(t.Context(), net.hosts[0], host, name,
			netip.PrefixFrom(net.Address(service.IPv4, i), 24), netip.PrefixFrom(net.Address(service.IPv6, i), 64)))
		net.hosts = append(net.hosts, host)
	}
	// Service addresses are nobody's; a node needs some route to try them.
	for _, f := range service.Families {
		net.must(netlink.RouteAdd(&netlink.Route{Gw: net.Address(f, n).AsSlice()}))
	}
	return net
}

func (n *Network) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// Address is host i's address.
func (n *Network) Address(f service.Family, i int) netip.Addr {
	if f == service.IPv6 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:%d::2", i))
	}
	return netip.MustParseAddr(fmt.Sprintf("10.%d.0.2", i))
}

// NodeAddress is the node's address on host i's link.
func (n *Network) NodeAddress(f service.Family, i int) netip.Addr { return n.Address(f, i).Prev() }

// On runs f on host i; 0 is the node.
func (n *Network) On(i int, f func()) {
	n.t.Helper()
	n.must(n.hosts[i].Do(func() error {
		f()
		return nil
	}))
}

// Serve answers on host i, in both families, TCP and UDP, as a [lab.Backend].
func (n *Network) Serve(i int, name string, port uint16) {
	n.t.Helper()
	n.start(lab.NewBackend(name, n.hosts[i], port))
}

// ServeSCTP answers on host i likewise.
func (n *Network) ServeSCTP(i int, name string, port uint16) {
	n.t.Helper()
	n.start(lab.NewBackend(name, n.hosts[i], port, n.Address(service.IPv4, i), n.Address(service.IPv6, i)))
}

func (n *Network) start(b *lab.Backend) {
	n.t.Helper()
	n.must(b.Start(n.t.Context()))
	n.t.Cleanup(b.Stop)
}

// Errors of Ask.
var (
	ErrRefused = errors.New("refused")
	ErrTimeout = errors.New("no answer")
)

// askTimeout is long enough on a busy machine for an answer, and short enough
// to wait for none. Where everything is slower (test/vm/run.sh says so), it is
// longer; silence, for where none is expected, is less so.
var (
	askTimeout = 700 * time.Millisecond * slowness()
	silence    = 700 * time.Millisecond * time.Duration(math.Round(math.Sqrt(float64(slowness()))))
)

func slowness() time.Duration {
	if n, err := strconv.Atoi(os.Getenv("KPROXY_E2E_SLOW")); err == nil && n > 1 {
		return time.Duration(n)
	}
	return 1
}

// Ask connects from host i to address and returns the answer: who served, and
// which client address it saw. It waits longer where an answer or a refusal is expected.
func (n *Network) Ask(i int, proto service.Protocol, to netip.AddrPort, expected bool) (server, client string, err error) {
	timeout := askTimeout
	if expected {
		timeout *= patience
	}
	return n.ask(i, proto, to, timeout)
}

// patience is how many times as long as for silence those wait that expect an answer.
const patience = 30

func (n *Network) ask(i int, proto service.Protocol, to netip.AddrPort, timeout time.Duration) (server, client string, err error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	a, err := n.hosts[i].Ask(ctx, proto.String(), to, "?")
	var timedOut net.Error
	switch {
	case err == nil:
		return a.Backend, a.Peer.String(), nil
	case errors.Is(err, unix.ECONNREFUSED):
		err = ErrRefused
	case errors.As(err, &timedOut) && timedOut.Timeout():
		err = ErrTimeout
	}
	return "", "", err
}
