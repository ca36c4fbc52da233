package web

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"kproxy.dev/kproxy/plan"
)

// maxEventLine is far more than a line of an event needs.
const maxEventLine = 1 << 20

// Events calls f for everything that happens from now on, until ctx ends or
// kproxy does.
func (c *Client) Events(ctx context.Context, f func(plan.Event)) error {
	s, err := c.Follow(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Each(f)
}

// Events is a stream of what happens since it was opened.
type Events struct{ body io.ReadCloser }

// Follow opens a stream that ends with ctx or with kproxy. The caller closes it.
func (c *Client) Follow(ctx context.Context) (*Events, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://kproxy/events", nil)
	if err != nil {
		return nil, fmt.Errorf("ask kproxy: %w", err)
	}
	stream := http.Client{Transport: c.http.Transport} // without a limit on the whole exchange
	resp, err := stream.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer func() { _ = resp.Body.Close() }()
		return nil, refusal(resp)
	}
	return &Events{resp.Body}, nil
}

// Close ends the stream.
func (s *Events) Close() { _ = s.body.Close() }

// Each calls f for every event until the stream ends.
func (s *Events) Each(f func(plan.Event)) error {
	lines := bufio.NewScanner(s.body)
	lines.Buffer(nil, maxEventLine)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var e plan.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("read kproxy's event: %w", err)
		}
		f(e)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read kproxy's events: %w", err)
	}
	return nil
}
