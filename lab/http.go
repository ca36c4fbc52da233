package lab

import (
	"net/http"
	"time"
)

// HTTPClient returns a client that connects from the namespace, anew for each
// request, so that none depends on the one before and nothing has to be closed.
// Hosts must be numeric, as with Dial. A timeout of 0 is none.
func (n *Namespace) HTTPClient(timeout time.Duration) *http.Client {
	return &http.Client{Timeout: timeout, Transport: &http.Transport{DisableKeepAlives: true, DialContext: n.Dial}}
}
