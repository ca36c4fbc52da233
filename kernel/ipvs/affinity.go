package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Virtuals returns the virtual servers that [Render] makes for one service.
func Virtuals(s *plan.Service, p *plan.Policy, o steering.Options) []kernel.Virtual {
	f := renderService(s, p, o)
	return append(f.virtuals, f.nodePorts...)
}

// ReadAffinity returns the clients that IPVS keeps with real servers of the
// given virtual servers, by their Owner. A client may be there more than once:
// every virtual server has clients of its own.
func ReadAffinity(virtuals []kernel.Virtual) (map[service.Key][]kernel.Client, error) {
	templates, err := readTemplates()
	if err != nil {
		return nil, fmt.Errorf("read affinity of virtual servers: %w", err)
	}
	of := make(map[key]*kernel.Virtual, len(virtuals))
	for i := range virtuals {
		of[keyOf(virtuals[i])] = &virtuals[i]
	}
	out := map[service.Key][]kernel.Client{}
	for t, b := range templates {
		if v := of[t.key]; v != nil {
			out[v.Owner] = append(out[v.Owner], kernel.Client{Address: t.client, Endpoint: b.real, Remaining: b.remaining})
		}
	}
	return out, nil
}

// template names a connection template, by which IPVS keeps a client with a real
// server: a connection without a client's port (struct ip_vs_conn with
// IP_VS_CONN_F_TEMPLATE).
type template struct {
	key
	client netip.Addr
}

// binding says where a template leads, and for how much longer.
type binding struct {
	real      netip.AddrPort
	remaining time.Duration
}

// connectionsPath is IPVS's connections in the calling thread's network
// namespace, templates among them. The time to read it grows with the square of
// their number: the kernel gives a page at a time, and looks for the place where
// it was from the beginning (ip_vs_conn_array in ip_vs_conn.c).
const connectionsPath = "/proc/thread-self/net/ip_vs_conn"

func readTemplates() (map[template]binding, error) {
	f, err := os.Open(connectionsPath)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseTemplates(f)
}

// parseTemplates reads what ip_vs_conn_seq_show prints (ip_vs_conn.c):
//
//	Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
//	TCP 0A010002 0000 0A60000A 0050 0A020004 1F90 ASSURED        3592
//
// The kernel keeps templates that it has given up, with 65535 for their ports.
// FTP's have no ports at all, and aren't those of any virtual server here.
func parseTemplates(r io.Reader) (map[template]binding, error) {
	out := map[template]binding{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		// Most lines are ordinary connections, and there may be a million of them.
		_, rest, _ := bytes.Cut(lines.Bytes(), []byte(" "))
		_, rest, _ = bytes.Cut(rest, []byte(" "))
		if !bytes.HasPrefix(rest, []byte("0000 ")) {
			continue
		}
		t, b, ok := parseTemplate(bytes.Fields(lines.Bytes()))
		if !ok {
			return nil, fmt.Errorf("parse line %d of %s: %w", n, connectionsPath, errProc)
		}
		if t.protocol != 0 && t.address.Port() != 0xffff {
			out[t] = b
		}
	}
	return out, lines.Err()
}

func parseTemplate(fields [][]byte) (t template, b binding, ok bool) {
	if len(fields) < 9 {
		return t, b, false
	}
	t.protocol = protocols[string(fields[0])]
	addresses, ports := [3]netip.Addr{}, [3]uint16{} // client, virtual and real server
	ok = true
	for i := range addresses {
		var okAddress, okPort bool
		addresses[i], okAddress = hexAddr(fields[1+2*i])
		ports[i], okPort = hexPort(fields[2+2*i])
		ok = ok && okAddress && okPort
	}
	t.client, t.address, b.real = addresses[0], netip.AddrPortFrom(addresses[1], ports[1]), netip.AddrPortFrom(addresses[2], ports[2])
	seconds, err := strconv.ParseUint(string(fields[8]), 10, 32)
	b.remaining = time.Duration(seconds) * time.Second
	return t, b, ok && err == nil
}

var errProc = errors.New("it isn't of the form that the kernel prints")

// protocols are those that IPVS knows, by the names of its files in /proc.
var protocols = map[string]service.Protocol{"TCP": service.TCP, "UDP": service.UDP, "SCTP": service.SCTP}

// hexAddr reads "0A010002" and "fd00:0001:0000:0000:0000:0000:0000:0002".
func hexAddr(s []byte) (netip.Addr, bool) {
	var v4 [4]byte
	if len(s) == hex.EncodedLen(len(v4)) && bytes.IndexByte(s, ':') < 0 {
		_, err := hex.Decode(v4[:], s)
		return netip.AddrFrom4(v4), err == nil
	}
	a, err := netip.ParseAddr(string(s))
	return a, err == nil && a.Is6()
}

func hexPort(s []byte) (uint16, bool) {
	var b [2]byte
	if len(s) != hex.EncodedLen(len(b)) {
		return 0, false
	}
	_, err := hex.Decode(b[:], s)
	return binary.BigEndian.Uint16(b[:]), err == nil
}

// seed is a template that is wanted.
type seed struct {
	template
	real    netip.AddrPort
	timeout uint32 // seconds after its last connection
}

// ftp is the port whose templates IPVS makes without ports (ip_vs_sched_persist),
// for which it finds no virtual server when it is told of one.
const ftp = 21

// seeds are the templates by which virtual servers keep their owners' clients.
// Clients of endpoints that are no real server there, or take no connections,
// are passed over: IPVS would give such a template up.
func seeds(virtuals []kernel.Virtual, clients map[service.Key][]kernel.Client) []seed {
	var out []seed
	for _, v := range virtuals {
		if v.Persistence == 0 || v.Protocol == service.TCP && v.Address.Port() == ftp {
			continue
		}
		takes := make(map[netip.AddrPort]bool, len(v.Reals))
		for _, r := range v.Reals {
			takes[r.Address] = r.Weight > 0
		}
		for _, c := range clients[v.Owner] {
			if takes[c.Endpoint] && c.Address.Is4() == v.Address.Addr().Is4() && c.Remaining > 0 {
				out = append(out, seed{template{keyOf(v), c.Address}, c.Endpoint, v.Persistence})
			}
		}
	}
	return out
}

// ErrOtherReal says that IPVS keeps clients with real servers that they had from
// it earlier, because they have had connections there until a moment ago.
var ErrOtherReal = errors.New("had connections to another endpoint through IPVS until a moment ago, and come there again")

// SeedAffinity makes virtual servers keep their owners' clients, when services
// move to IPVS. A client's time begins anew: to the kernel, what is left of it
// now would be what it has from now on, after each connection.
//
// The kernel takes templates only as a backup of another load balancer does, so
// for as long as this takes there is a synchronisation daemon, which listens on
// the loopback link. Where another program runs one, this fails with
// [ErrSyncDaemon], and changes nothing. The rules see to it that the daemon
// gets only packets with mark, kproxy's own.
func SeedAffinity(ctx context.Context, mark uint32, virtuals []kernel.Virtual, clients map[service.Key][]kernel.Client) error {
	wanted := seeds(virtuals, clients)
	if len(wanted) == 0 {
		return nil
	}
	if err := seedAll(ctx, mark, wanted); err != nil {
		return fmt.Errorf("seed affinity of virtual servers: %w", err)
	}
	return nil
}

// seedAll brings wanted into the kernel. It sends first and compares then, because
// reading takes long where there are many connections: what matters is there soon.
func seedAll(ctx context.Context, mark uint32, wanted []seed) (err error) {
	t, err := OpenTable()
	if err != nil {
		return err
	}
	defer t.Close()
	d, err := t.startSync(mark)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	elsewhere, err := d.seed(ctx, wanted)
	if err != nil || len(elsewhere) == 0 {
		return err
	}
	return d.replace(ctx, elsewhere)
}

// compareSeeds tells which of wanted the kernel doesn't have, and which it has
// with another real server.
func compareSeeds(wanted []seed) (missing, elsewhere []seed, err error) {
	have, err := readTemplates()
	if err != nil {
		return nil, nil, err
	}
	for _, s := range wanted {
		if b, ok := have[s.template]; !ok {
			missing = append(missing, s)
		} else if b.real != s.real {
			elsewhere = append(elsewhere, s)
		}
	}
	return missing, elsewhere, nil
}

// seedPatience is the longest pause before seeds are sent again, of pauses that double: datagrams may be
// lost, even here, and until Linux 6.5 a processor whose ksoftirqd waits for its turn delivers
// none (ksoftirqd_running in kernel/softirq.c).
const seedPatience = 2 * time.Second

// seed sends seeds until the kernel has a template for each, and returns those
// that it has with another real server.
func (d *syncDaemon) seed(ctx context.Context, wanted []seed) (elsewhere []seed, err error) {
	for wait := time.Millisecond; ; wait *= 2 {
		if err := d.send(ctx, wanted); err != nil {
			return nil, err
		}
		missing, other, err := compareSeeds(wanted)
		if err != nil {
			return nil, err
		}
		elsewhere = append(elsewhere, other...)
		if wanted = missing; len(wanted) == 0 {
			return elsewhere, nil
		}
		if wait > seedPatience {
			return nil, fmt.Errorf("%d of the kernel's templates don't appear", len(wanted))
		}
		if err := pause(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// endPatience is ample for a template that ends after a second.
const endPatience, endInterval = 2 * time.Second, 500 * time.Millisecond

// replace makes templates in the stead of others, which can't be changed, but
// be made to end soon: after the connections that they have brought about, of
// which IPVS remembers each for two minutes after its end. Those that don't end
// get their time back.
func (d *syncDaemon) replace(ctx context.Context, elsewhere []seed) error {
	ending := slices.Clone(elsewhere)
	for i := range ending {
		ending[i].timeout = 1
	}
	if err := d.send(ctx, ending); err != nil {
		return err
	}
	for waited := time.Duration(0); waited < endPatience; waited += endInterval {
		if err := pause(ctx, endInterval); err != nil {
			return err
		}
		_, still, err := compareSeeds(elsewhere)
		if err != nil {
			return err
		}
		if len(still) == 0 {
			break
		}
	}
	still, err := d.seed(ctx, elsewhere)
	if err == nil && len(still) > 0 {
		err = fmt.Errorf("%d clients %w", len(still), ErrOtherReal)
	}
	return err
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
