package ipvs

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
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
