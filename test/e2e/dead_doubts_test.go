package e2e

import (
	"context"
	big "encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/service"
)

// What x/sys/unix doesn't have of linux/netfilter/nfnetlink_queue.h.
const (
	queuePacket  = unix.NFNL_SUBSYS_QUEUE << 8   // NFQNL_MSG_PACKET, 0
	queueVerdict = unix.NFNL_SUBSYS_QUEUE<<8 | 1 // NFQNL_MSG_VERDICT
	queueConfig  = unix.NFNL_SUBSYS_QUEUE<<8 | 2 // NFQNL_MSG_CONFIG
)

// delay has what a backend sends in IPv4 leave as much later as wait says, packet by packet.
func (w *world) delay(b *lab.Backend, wait func() time.Duration) {
	w.Helper()
	var socket *netlink.Socket
	w.must(b.Namespace.Do(func() (err error) {
		socket, err = netlink.Open(unix.NETLINK_NETFILTER, 64<<10)
		return err
	}))
	request := func(kind, flags uint16, attributes func([]byte) []byte) []byte {
		m := netlink.AppendRequest(nil, kind, flags)
		m = attributes(append(m, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0))
		big.NativeEndian.PutUint32(m, uint32(len(m)))
		return m
	}
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	w.must(unix.Sendto(socket.FD, request(queueConfig, 0, func(m []byte) []byte {
		m = netlink.Append(m, 1, 1, 0, 0, 0)       // NFQA_CFG_CMD: NFQNL_CFG_CMD_BIND
		return netlink.Append(m, 2, 0, 0, 0, 0, 1) // NFQA_CFG_PARAMS: NFQNL_COPY_META
	}), 0, kernel))
	ctx, cancel := context.WithCancel(w.ctx)
	over := make(chan struct{})
	w.Cleanup(func() {
		cancel()
		<-over
		socket.Close()
	})
	go func() {
		defer close(over)
		buf := make([]byte, 64<<10)
		for ctx.Err() == nil {
			n, err := unix.Read(socket.FD, buf)
			if err != nil {
				time.Sleep(5 * time.Millisecond)
				continue
			}
			for m := range netlink.Messages(buf[:n]) {
				if m.Type != queuePacket {
					continue
				}
				for typ, v := range netlink.Attributes(m.Body[netlink.SizeofNetfilter:]) {
					if typ != 1 { // NFQA_PACKET_HDR
						continue
					}
					verdict := append([]byte{0, 0, 0, 1}, v[:4]...) // NF_ACCEPT
					time.AfterFunc(wait(), func() {
						if ctx.Err() == nil {
							_ = unix.Sendto(socket.FD, request(queueVerdict, 0, func(m []byte) []byte { return netlink.Append(m, 2, verdict...) }), 0, kernel)
						}
					})
				}
			}
		}
	}()
	if out, err := b.Namespace.Output(w.ctx, "iptables", "-w", "-I", "OUTPUT", "!", "-o", "lo", "-j", "NFQUEUE", "--queue-num", "0"); err != nil {
		w.Skipf("this kernel has no queue: %v %s", err, out)
	}
}

// TestSlowEndpoints: what answers late isn't silent: a host far away, and one whose program has nothing to say.
func TestSlowEndpoints(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferKernel)
	w.pin("web", "datagram", service.PreferKernel)
	w.must(w.net.Backend("b2").Fail(w.ctx, lab.Silent)) // it accepts, and answers neither TCP nor UDP
	w.delay(w.net.Backend("b1"), func() time.Duration { return 300*time.Millisecond + rand.N(600*time.Millisecond) })
	tcp, udp := w.traffic("tcp", frontends(m)[0], 20), w.traffic("udp", frontends(m)[0], 20)
	sleep(8 * time.Second)
	udp.Stop()
	all := tcp.Stop()
	if by := all.ByBackend(); by["b1"] == 0 || by["b3"] == 0 {
		t.Errorf("connections went %v", by)
	}
	for _, r := range all {
		if r.Answer.Backend == "b1" && r.Latency < 600*time.Millisecond { // the handshake and the answer, each as late as that
			t.Fatalf("b1 isn't slow: %s", r.Latency)
		}
	}
	if n := w.ejections(); n != 0 {
		t.Errorf("%g ejections", n)
	}
}

// storm sends SYNs from addresses that no host has, rate a second, until the returned function is called, which says how many
// there were. They come from so many addresses and ports that each comes again after some seconds.
func (w *world) storm(to netip.AddrPort, rate int) (stop func() int) {
	w.Helper()
	spoofed := netip.MustParsePrefix("10.9.0.0/16")
	w.node("ip", "route", "add", spoofed.String(), "via", w.net.Config.ClientAddresses(0)[0].String())
	for _, args := range [][]string{{"ip", "route", "add", "local", spoofed.String(), "dev", "lo"}, {"iptables", "-w", "-I", "INPUT", "-d", spoofed.String(), "-j", "DROP"}} {
		if out, err := w.net.Client.Output(w.ctx, args[0], args[1:]...); err != nil {
			w.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	var fd int
	w.must(w.net.Client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}))
	ctx, cancel := context.WithCancel(w.ctx)
	sent := make(chan int, 1)
	go func() {
		const clients, every = 40_000, 5 * time.Millisecond
		n, start := 0, time.Now()
		tick := time.NewTicker(every)
		defer tick.Stop()
		for ctx.Err() == nil {
			<-tick.C
			for due := int(time.Since(start).Seconds() * float64(rate)); n < due; n++ {
				i := n % clients
				from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), uint16(1024+i))
				if err := unix.Sendto(fd, synOf(from, to), 0, &unix.SockaddrInet4{Addr: to.Addr().As4()}); err != nil {
					w.Logf("SYN %d: %v", n, err)
				}
			}
		}
		unix.Close(fd)
		sent <- n
	}()
	return func() int { cancel(); return <-sent }
}

// synOf returns a SYN of IPv4 with its header.
func synOf(from, to netip.AddrPort) []byte {
	p := make([]byte, 40)
	p[0], p[3], p[8], p[9] = 0x45, 40, 64, unix.IPPROTO_TCP
	copy(p[12:], from.Addr().AsSlice())
	copy(p[16:], to.Addr().AsSlice())
	tcp := p[20:]
	big.BigEndian.PutUint16(tcp, from.Port())
	big.BigEndian.PutUint16(tcp[2:], to.Port())
	big.BigEndian.PutUint32(tcp[4:], 1)
	tcp[12], tcp[13], tcp[14] = 5<<4, 2, 0x40 // SYN
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for at := 12; at < len(p); at += 2 {
		sum += uint32(big.BigEndian.Uint16(p[at:]))
	}
	sum = sum>>16 + sum&0xffff
	big.BigEndian.PutUint16(tcp[16:], ^uint16(sum>>16+sum))
	return p
}

// TestStormOfSYNs: SYNs from addresses that no host has harm neither other services nor the verdict on their endpoints, whether the endpoints they go
// to answer or not.
func TestStormOfSYNs(t *testing.T) {
	w := newLoneWorld(t)
	stormed, web := newManifest("stormed", 11, w.net.Backend("b3")), newManifest("web", 10, w.net.Backend("b1"), w.net.Backend("b2"))
	w.must(stormed.Write(w.manifests))
	w.must(web.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("stormed", "line", service.PreferKernel)
	w.pin("web", "line", service.PreferKernel)
	for _, answers := range []bool{true, false} {
		name := fmt.Sprintf("endpoint answers: %v", answers)
		if !answers {
			w.cutOff("b3")
		}
		before, err := load.ProcessTime(w.proxy.PID())
		w.must(err)
		stop := w.storm(frontends(stormed)[0], int(thinned(20_000)))
		began := time.Now()
		tr := w.traffic("tcp", frontends(web)[0], 20)
		sleep(5 * time.Second)
		all := tr.Stop()
		w.noneFailed("during the storm, "+name, all)
		after, err := load.ProcessTime(w.proxy.PID())
		w.must(err)
		took := time.Since(began)
		if !answers {
			w.cutOff("b1") // and now another service's endpoint dies
			tr := w.traffic("tcp", frontends(web)[0], 20)
			w.awaitUnused("web", "line", "10.2.0.2")
			tr.Stop()
		}
		w.node("ip", "route", "del", "10.9.0.0/16")
		n := stop()
		out, err := w.net.Client.Output(w.ctx, "sh", "-c", "ip route del local 10.9.0.0/16 dev lo; iptables -w -F INPUT")
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		var longest time.Duration
		for _, r := range all {
			longest = max(longest, r.Latency)
		}
		t.Logf("%s: %d SYNs; kproxy used %.2f s of processor time in %.1f s; %d polite connects, longest %s", name, n, after-before, took.Seconds(), len(all), longest)
	}
}

// TestManyServicesOfADeadNode: fifty services have an endpoint each on a node that dies. Most of their clients have met none of its
// silence when its other endpoints' silence tells of all.
func TestManyServicesOfADeadNode(t *testing.T) {
	w := newWorld(t)
	const count, rate = 50, 200.0 // connects a second, of all services
	for i, b := range w.net.Backends {
		network := fmt.Sprintf("10.3.%d.0/24", i)
		w.node("ip", "route", "add", network, "via", b.Addresses[0].String(), "onlink", "dev", b.Name)
		if out, err := b.Namespace.Output(w.ctx, "ip", "route", "add", "local", network, "dev", "lo"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	var names []string
	var targets []netip.AddrPort
	for n := range count {
		m := newManifest(fmt.Sprint("web-", n), 10+n)
		for i, b := range w.net.Backends {
			m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{Name: b.Name, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 3, byte(i), byte(1 + n)})}, Node: "n-" + b.Name, Weight: 1})
		}
		m.DataPlane = string(service.PreferKernel)
		w.must(m.Write(w.manifests))
		names, targets = append(names, m.Name), append(targets, frontends(m)[0])
	}
	w.start("--health-check", "off")
	for _, name := range names {
		w.await(name, "line", w.plane, "")
	}
	var traffic []*lab.Traffic
	for _, to := range targets {
		traffic = append(traffic, w.traffic("tcp", to, rate/count))
		time.Sleep(time.Duration(float64(time.Second) / rate))
	}
	sleep(time.Second)
	w.cutOff("b1")
	silent := time.Now()
	w.eventually(30*time.Second, "the node's endpoints to be ejected", func() error {
		st, err := w.client.Status(w.ctx)
		if err != nil {
			return err
		}
		n := 0
		for _, s := range st.Services {
			for _, e := range s.Endpoints {
				if s.Port == "line" && e.Node == "n-b1" && !e.Usable {
					n++
				}
			}
		}
		if n < count {
			return fmt.Errorf("%d of %d", n, count)
		}
		return nil
	})
	after := time.Now()
	sleep(2 * time.Second)
	var longest, last time.Duration
	for i, tr := range traffic {
		all := tr.Stop().Since(silent)
		if l := late(all, 8*time.Second); len(l) > 0 {
			t.Errorf("%s: connections that began when the node died: %v", names[i], l)
		}
		if l := late(all.Since(after.Add(within(200*time.Millisecond))), time.Second); len(l) > 0 {
			t.Errorf("%s: connections after it was ejected: %v", names[i], l)
		}
		for _, r := range all {
			if longest = max(longest, r.Latency); r.Latency > 100*time.Millisecond {
				last = max(last, r.Start.Sub(silent))
			}
		}
	}
	t.Logf("all were ejected %s after; the longest connect took %s, the last of more than 100 ms began %s after", after.Sub(silent), longest, last)
}
