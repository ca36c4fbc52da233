package probe

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
)

const (
	// maxHTTPHeader bounds what a probe reads of an answer's header, and of
	// its body.
	maxHTTPHeader = 64 << 10
	maxHTTPBody   = 16 << 10
	// maxInformational bounds the 1xx answers before the final one.
	maxInformational = 8
)

// http is up when a GET is answered with a status from 200 to 399, which is
// kubelet's rule. A redirect is an answer; it isn't followed. The Host header
// is the endpoint's address. It works on the connection itself: an
// http.Transport keeps two goroutines and a pool for connections that are
// never used again.
func (n Network) http(ctx context.Context, addr netip.AddrPort, path string) error {
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+path, nil)
	if err != nil {
		return fmt.Errorf("make a request for path %q: %w", path, err)
	}
	req.Close = true
	req.Header.Set("User-Agent", "kproxy-health")
	req.Header.Set("Accept", "*/*")
	c, err := n.dialTCP(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	defer bindContext(ctx, c)()
	if err := req.Write(c); err != nil {
		return err
	}
	limit := &io.LimitedReader{R: c, N: maxHTTPHeader}
	status, err := finalStatus(bufio.NewReader(limit), req, limit)
	if err != nil {
		return err
	}
	if status < 200 || status > 399 {
		return fmt.Errorf("HTTP status %d", status)
	}
	return nil
}

// finalStatus reads answers until one is final, and as much of its body as
// lets a server finish its write before the connection is reset.
func finalStatus(r *bufio.Reader, req *http.Request, limit *io.LimitedReader) (int, error) {
	for range maxInformational {
		resp, err := http.ReadResponse(r, req)
		if err != nil && limit.N == 0 {
			return 0, fmt.Errorf("header longer than %d bytes", maxHTTPHeader)
		}
		if err != nil {
			return 0, err
		}
		if resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols {
			continue
		}
		limit.N = maxHTTPBody
		if resp.ContentLength > 0 && resp.ContentLength <= maxHTTPBody {
			io.Copy(io.Discard, resp.Body) // the status has decided
		}
		return resp.StatusCode, nil
	}
	return 0, fmt.Errorf("more than %d informational answers", maxInformational)
}
