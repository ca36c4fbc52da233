package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"
)

// load starts what goes on while services are rolled out. Each function that it
// returns ends one kind of it and checks that no request failed.
func (r *rollout) load() (stops []func()) {
	r.Helper()
	for i, m := range r.services {
		for family := range m.ClusterIPs {
			if slow > 1 && family != i%2 {
				continue // all of it would keep an emulated machine busy for minutes
			}
			what := fmt.Sprintf("%s by IPv%d", m.Name, 4+2*family)
			stream := r.traffic("tcp", r.target(m, family, 0), 30)
			stops = append(stops,
				func() { r.noneFailed("new connections to "+what, stream.Stop()) },
				r.requests("connections that last, to "+what, r.lasting(r.target(m, family, 0))),
				r.requests("one UDP client of "+what, r.resolver(r.target(m, family, 1), false)),
				r.requests("UDP clients of "+what, r.resolver(r.target(m, family, 1), true)),
				r.requests("HTTP client of "+what, r.browser(r.target(m, family, 2))))
		}
	}
	return stops
}

// requests makes one after another until the function that it returns is called,
// and counts those that fail.
func (r *rollout) requests(what string, request func(ctx context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(r.ctx)
	var done sync.WaitGroup
	var made int
	var failures []string
	done.Go(func() {
		for ctx.Err() == nil {
			one, end := context.WithTimeout(r.ctx, within(5*time.Second))
			start := time.Now()
			if err := request(one); err != nil {
				failures = append(failures, fmt.Sprintf("request %d of %s, after %s: %v", made, start.Format("15:04:05.000"), time.Since(start), err))
			}
			end()
			made++
			time.Sleep(within(within(15 * time.Millisecond)))
		}
	})
	r.Cleanup(func() { cancel(); done.Wait() })
	return func() {
		r.Helper()
		cancel()
		done.Wait()
		if made == 0 || len(failures) > 0 {
			r.Errorf("%s: %d requests, %d failed %v", what, made, len(failures), failures[:min(3, len(failures))])
		}
	}
}

// lasting asks 20 times over each connection, on a slow machine fewer times, as each takes longer there.
func (r *rollout) lasting(target netip.AddrPort) func(context.Context) error {
	var conn net.Conn
	asked, times := 0, int(max(4, 20/slow))
	return func(ctx context.Context) (err error) {
		if conn == nil {
			asked = 0
			if conn, err = r.net.Client.Dial(ctx, "tcp", target.String()); err != nil {
				conn = nil
				return err
			}
		}
		asked++
		err = exchangeOn(ctx, conn, "hello\n")
		if err != nil || asked == times {
			conn.Close()
			conn = nil
		}
		return err
	}
}

// resolver asks from one port all the time, to the kernel one flow for good, or from
// another each time. An answer that is on its way while its flow is taken from an
// endpoint that has stopped serving is lost, as nothing says any more which client it is for;
// so it asks again, once, as resolvers do.
func (r *rollout) resolver(target netip.AddrPort, anew bool) func(context.Context) error {
	var conn net.Conn
	return func(ctx context.Context) (err error) {
		if conn == nil || anew {
			if conn, err = r.net.Client.Dial(ctx, "udp", target.String()); err != nil {
				conn = nil
				return err
			}
			if anew {
				defer conn.Close()
			} else {
				r.Cleanup(func() { conn.Close() })
			}
		}
		soon, cancel := context.WithTimeout(ctx, within(time.Second))
		defer cancel()
		if err := exchangeOn(soon, conn, "hello"); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		return exchangeOn(ctx, conn, "hello")
	}
}

func exchangeOn(ctx context.Context, conn net.Conn, payload string) error {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := conn.Write([]byte(payload)); err != nil {
		return fmt.Errorf("from %s: %w", conn.LocalAddr(), err)
	}
	if _, err := conn.Read(make([]byte, 100)); err != nil {
		return fmt.Errorf("from %s: %w", conn.LocalAddr(), err)
	}
	return nil
}

// browser keeps its connection as long as the server does.
func (r *rollout) browser(target netip.AddrPort) func(context.Context) error {
	transport := &http.Transport{DialContext: r.net.Client.Dial}
	r.Cleanup(transport.CloseIdleConnections)
	client := http.Client{Transport: transport}
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+target.String()+"/", nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return err
	}
}
