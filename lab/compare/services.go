package compare

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
)

// loadService is the address of the service that carries every load but first
// packets.
var loadService = netip.MustParseAddr("10.96.0.10")

// fillerPort is the port of the services that there are many of.
const fillerPort = 80

// filler is the address of the i-th of the services that there are many of, i
// from 0; one of them carries first packets.
func filler(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 10<<24|97<<16+uint32(i)+1)
	return netip.AddrFrom4(b)
}

// annotation holds a service where the plane is.
func (p Plane) annotation() string {
	if p == Userspace {
		return "userspace"
	}
	return "kernel"
}

// loadManifest describes the service with a port for each kind of load.
func loadManifest(p Plane, backends []*lab.Backend) lab.Manifest {
	m := lab.Manifest{Name: "load", ClusterIPs: []netip.Addr{loadService}, DataPlane: p.annotation(), Endpoints: endpoints(backends)}
	for _, k := range []load.Kind{load.Throughput, load.Requests, load.Connections, load.Datagrams} {
		port := lab.ManifestPort{Name: string(k), Protocol: "TCP", Port: k.Port(), Target: k.Port()}
		if k == load.Datagrams {
			port.Protocol = "UDP"
		}
		m.Ports = append(m.Ports, port)
	}
	return m
}

func fillerManifest(p Plane, i int, backends []*lab.Backend) lab.Manifest {
	return lab.Manifest{
		Name: fmt.Sprintf("service-%05d", i), ClusterIPs: []netip.Addr{filler(i)}, DataPlane: p.annotation(), Endpoints: endpoints(backends),
		Ports: []lab.ManifestPort{{Name: "answer", Protocol: "TCP", Port: fillerPort, Target: load.Firsts.Port()}},
	}
}

func endpoints(backends []*lab.Backend) []lab.ManifestEndpoint {
	var out []lab.ManifestEndpoint
	for _, b := range backends {
		out = append(out, lab.ManifestEndpoint{Name: b.Name, Addresses: b.Addresses, Weight: 1})
	}
	return out
}

// writeFillers writes the services from, from+1, … to-1 as one file, by rename.
func writeFillers(dir string, p Plane, from, to int, backends []*lab.Backend) error {
	f, err := os.CreateTemp(dir, ".services-*.tmp")
	if err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	w := bufio.NewWriter(f)
	for i := from; i < to; i++ {
		fmt.Fprintf(w, "%s---\n", fillerManifest(p, i, backends).YAML())
	}
	err = cmp.Or(w.Flush(), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, fmt.Sprintf("services-%d.yaml", to)))
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write manifests: %w", err)
	}
	return nil
}
