package web

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"kproxy.dev/kproxy/plan"
)

// maxEventLine is far more than a line of an event needs.
const maxEventLine = 1 << 20

// Events calls f for everything that happens from now on, until ctx ends or
// kproxy does.
func (c *Client) Events(ctx context.Context, f func(plan.Event)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://kproxy/events", nil)
	if err != nil {
		return fmt.Errorf("ask kproxy: %w", err)
	}
	stream := http.Client{Transport: c.http.Transport} // without a limit on the whole exchange
	resp, err := stream.Do(req)
	if err != nil {
		return c.explain(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return refusal(resp)
	}
	lines := bufio.NewScanner(resp.Body)
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
