package web

import (
	"net/http"
	"strconv"
	"time"

	"kproxy.dev/kproxy/plan"
)

// healthPortBody is kube-proxy's answer at a Service's healthCheckNodePort.
type healthPortBody struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// HealthPort is the handler for a Service's healthCheckNodePort, as kube-proxy's:
// load balancers ask it, by whatever path, whether this node has endpoints for
// them. It has where it says 200; the header tells how many, for those that
// weigh nodes by that. The node's eligibility is for /healthz to say.
func HealthPort(src Source, now func() plan.HealthPort) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := now()
		var body healthPortBody
		body.Service.Namespace, body.Service.Name = h.Namespace, h.Name
		body.LocalEndpoints = h.Endpoints
		body.ServiceProxyHealthy = healthOfProxy(src.Health(), time.Now()).Healthy
		code := http.StatusServiceUnavailable
		if body.LocalEndpoints > 0 && body.ServiceProxyHealthy {
			code = http.StatusOK
		}
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(body.LocalEndpoints))
		writeJSON(w, code, body)
	})
}
