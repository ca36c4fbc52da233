package e2e

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
)

// scraped is what one scrape brought.
type scraped struct {
	text string
	wire int // bytes, compressed
	took time.Duration
}

// scrape asks for /metrics as Prometheus does: compressed.
func (w *world) scrape() (scraped, error) {
	start := time.Now()
	c := http.Client{Timeout: within(30 * time.Second), Transport: &http.Transport{
		DisableKeepAlives: true, DisableCompression: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return w.net.Node.Dial(ctx, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(w.ctx, http.MethodGet, "http://127.0.0.1:10249/metrics", nil)
	if err != nil {
		return scraped{}, err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := c.Do(req)
	if err != nil {
		return scraped{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Encoding") != "gzip" {
		return scraped{}, fmt.Errorf("%s, encoded as %q", resp.Status, resp.Header.Get("Content-Encoding"))
	}
	wire := &counted{r: resp.Body}
	z, err := gzip.NewReader(wire)
	if err != nil {
		return scraped{}, err
	}
	text, err := io.ReadAll(z)
	return scraped{string(text), wire.n, time.Since(start)}, err
}

// counted counts what is read.
type counted struct {
	r io.Reader
	n int
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

// TestScrapesOfManyServices: with 5,000 services of three endpoints, two scrapes
// at a time are answered in full, with the usual limits and with series for
// everything. How long they take is in the log.
func TestScrapesOfManyServices(t *testing.T) {
	const many = 5000
	for _, tt := range []struct {
		name                string
		args                []string
		services, endpoints int // series of each
		offloaded           bool
	}{
		{"kernel", []string{"--offload-min-connections", "0"}, 501, 1001, true},
		{"userspace", []string{"--mode", "userspace"}, 501, 1001, false},
		{"all series", []string{"--mode", "userspace", "--metrics-service-limit", "10000", "--metrics-endpoint-limit", "100000"}, many, 3 * many, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newLoneWorld(t)
			var endpoints []netip.Addr
			for _, b := range w.net.Backends {
				endpoints = append(endpoints, b.Addresses[0])
			}
			write(t, filepath.Join(w.manifests, "many.yaml"), manyServices(many, endpoints...))
			w.start(tt.args...)
			if tt.offloaded {
				w.eventually(3*time.Minute, "all to be offloaded", func() error { return w.allIn(w.plane, many) })
			}
			w.scrapeTwice(tt.services, tt.endpoints)
			w.ask(w.net.Client, "tcp", netip.AddrPortFrom(nthService(many-1), 80))
		})
	}
}

// allIn reports whether so many services are in a data plane.
func (w *world) allIn(plane plan.DataPlane, want int) error {
	sleep(500 * time.Millisecond)
	m, err := w.metrics()
	if got := m[fmt.Sprintf("kproxy_services{dataplane=%q}", plane)]; err == nil && got != float64(want) {
		err = fmt.Errorf("%g are in %s", got, plane)
	}
	return err
}

// scrapeTwice scrapes one at a time, and then two at once.
func (w *world) scrapeTwice(services, endpoints int) {
	w.Helper()
	for _, scrapers := range []int{1, 2} {
		got := make([]scraped, scrapers)
		errs := make([]error, scrapers)
		var all sync.WaitGroup
		for i := range scrapers {
			all.Go(func() { got[i], errs[i] = w.scrape() })
		}
		all.Wait()
		w.must(errors.Join(errs...))
		for i, s := range got {
			w.Logf("scrape %d of %d: %s, %d bytes on the wire, %d of text, %d series",
				i+1, scrapers, s.took.Round(time.Millisecond), s.wire, len(s.text), strings.Count(s.text, "\n"))
			if n := strings.Count(s.text, "\nkproxy_service_connections_total{"); n != services {
				w.Errorf("scrape %d of %d: %d series of services, want %d", i+1, scrapers, n, services)
			}
			if n := strings.Count(s.text, "\nkproxy_endpoint_connections_total{"); n != endpoints {
				w.Errorf("scrape %d of %d: %d series of endpoints, want %d", i+1, scrapers, n, endpoints)
			}
			if !strings.HasSuffix(s.text, "\n") {
				w.Errorf("scrape %d of %d was cut short", i+1, scrapers)
			}
		}
	}
}
