package web

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// lateAfter is how long a change may wait for a successful pass: twice
// kube-proxy's default syncPeriod.
const lateAfter = 60 * time.Second

// healthBody is kube-proxy's (pkg/proxy/healthcheck, type ProxyHealth).
type healthBody struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status"`
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Health is the handler for --healthz-bind-address: kube-proxy's /healthz and
// /livez, and /readyz.
//
// /livez fails when a change has waited for 60 seconds; idle and starting count
// as healthy. /healthz fails also when the node is about to be deleted, or cut off from others where that is asked for, so that
// cloud load balancers stop sending new connections while old ones drain.
// /readyz succeeds while new connections to every service are carried, from when
// the fallback rules are written.
//
// Counters takes those of answers, kube-proxy's
// kubeproxy_proxy_healthz_total and kubeproxy_proxy_livez_total.
func Health(src Source, counters prometheus.Registerer) http.Handler {
	answers := func(name string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "proxy_" + name + "_total",
			Help: "Cumulative answers of /" + name + " by HTTP status code.",
		}, []string{"code"})
		counters.MustRegister(v)
		return v
	}
	healthz, livez := answers("healthz"), answers("livez")
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		report := src.Health()
		body := healthOfProxy(report, time.Now())
		eligible := report.NodeEligible && !report.Drained && !report.Isolated
		body.NodeEligible = &eligible
		answerHealth(w, body, body.Healthy && eligible, healthz)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		body := healthOfProxy(src.Health(), time.Now())
		answerHealth(w, body, body.Healthy, livez)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := src.Health().NotReady; why != "" {
			plainText(w, http.StatusServiceUnavailable, "not ready: "+why+"\n")
			return
		}
		plainText(w, http.StatusOK, "ok\n")
	})
	return withSecurityHeaders(readOnly(mux))
}

// healthOfProxy applies kube-proxy's rule.
func healthOfProxy(r HealthReport, now time.Time) healthBody {
	healthy := r.PendingSince.IsZero() || now.Sub(r.PendingSince) < lateAfter
	family := familyHealth{LastUpdated: r.LastUpdated, Healthy: healthy}
	return healthBody{
		LastUpdated: r.LastUpdated, CurrentTime: now, Healthy: healthy,
		Status: map[string]familyHealth{"IPv4": family, "IPv6": family},
	}
}

func answerHealth(w http.ResponseWriter, body healthBody, ok bool, total *prometheus.CounterVec) {
	code := http.StatusServiceUnavailable
	if ok {
		code = http.StatusOK
		// kube-proxy does so because its old releases synced every 30 seconds,
		// change or none, and monitors came to expect a recent time.
		body.LastUpdated = body.CurrentTime
	}
	total.WithLabelValues(strconv.Itoa(code)).Inc()
	writeJSON(w, code, body)
}

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
// them. It has where it says 200; the header says how many, for those that
// weigh nodes by that. The node's eligibility is for /healthz to say, unless an operator drains it.
func HealthPort(src Source, now func() plan.HealthPort) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := now()
		var body healthPortBody
		body.Service.Namespace, body.Service.Name = h.Namespace, h.Name
		body.LocalEndpoints = h.Endpoints
		report := src.Health()
		body.ServiceProxyHealthy = healthOfProxy(report, time.Now()).Healthy && !report.Drained
		code := http.StatusServiceUnavailable
		if body.LocalEndpoints > 0 && body.ServiceProxyHealthy {
			code = http.StatusOK
		}
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(body.LocalEndpoints))
		writeJSON(w, code, body)
	})
}
