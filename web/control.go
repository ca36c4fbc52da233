package web

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// PinRequest asks to keep a service in a data plane.
type PinRequest struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Port is a port's name or number; empty means every port of the service.
	Port       string             `json:"port,omitempty"`
	Preference service.Preference `json:"preference"`
}

// PinResult says what was pinned, as NAMESPACE/NAME[:PORT].
type PinResult struct {
	Pinned []string `json:"pinned"`
}

// readiness says whether new connections to every service are carried.
type readiness struct {
	NotReady string `json:"notReady"` // why not; empty if they are
}

// maxPinBody is far more than any PinRequest needs.
const maxPinBody = 64 << 10

// Control is the handler of the control socket. Who can open the socket can
// change the proxy: the socket's mode is the only protection. The recorder of c keeps
// the events of the past. handOver is called for each kproxy that asks to take over, and has the connection to it; with nil
// none can.
func Control(c APIConfig, handOver func(*net.UnixConn)) http.Handler {
	src := c.Source
	mux := http.NewServeMux()
	long := newSlots(answersAtOnce, answersAtOnce) // all are one client here
	mux.Handle("GET /status", long.bound(status(src)))
	mux.Handle("GET /connections", long.bound(connections(src)))
	mux.Handle("GET /events", newEventStream(src))
	mux.Handle("GET /timeline", long.bound(timeline(c.Recorder)))
	mux.HandleFunc("POST /pin", pin(src))
	mux.HandleFunc("POST /drain", drain(src))
	mux.HandleFunc("GET /ready", answer(func(http.ResponseWriter, *http.Request) (any, error) {
		return readiness{src.Health().NotReady}, nil
	}))
	serveTraces(mux, "GET /trace", src, true)
	// For bug reports, also where there is no --metrics-bind-address.
	mux.Handle("GET /metrics", long.bound(serveMetrics(c.Gatherer)))
	mux.HandleFunc("GET /configz", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, c.Configz) })
	mux.HandleFunc("GET /log", func(w http.ResponseWriter, _ *http.Request) { plainText(w, http.StatusOK, string(c.Log())) })
	if handOver != nil {
		mux.HandleFunc("POST "+takeoverPath, takeover(handOver))
	}
	return mux
}

func pin(src Source) http.HandlerFunc {
	return answer(func(w http.ResponseWriter, r *http.Request) (any, error) {
		var req PinRequest
		dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxPinBody))
		dec.DisallowUnknownFields()
		err := dec.Decode(&req)
		if err == nil {
			if _, end := dec.Token(); end != io.EOF {
				err = errors.New("more than one JSON value")
			}
		}
		if err != nil {
			return nil, httpError{http.StatusBadRequest, "read pin request: " + err.Error()}
		}
		if !slices.Contains([]service.Preference{service.PreferAuto, service.PreferUserspace, service.PreferKernel}, req.Preference) {
			return nil, httpError{http.StatusBadRequest, fmt.Sprintf("%q is not a preference; use userspace, kernel or auto", string(req.Preference))}
		}
		keys, err := match(src.Status().Services, req)
		if err != nil {
			return nil, httpError{http.StatusNotFound, err.Error()}
		}
		result := PinResult{Pinned: make([]string, 0, len(keys))}
		for _, k := range keys {
			if err := src.Pin(k, req.Preference); err != nil {
				return nil, httpError{http.StatusInternalServerError, fmt.Sprintf("pin %s: %v", k, err)}
			}
			result.Pinned = append(result.Pinned, k.String())
		}
		return result, nil
	})
}

// drain takes whether the node is to be drained, as on=true or on=false.
func drain(src Pins) http.HandlerFunc {
	return answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
		on, err := strconv.ParseBool(r.URL.Query().Get("on"))
		if err != nil {
			return nil, httpError{http.StatusBadRequest, "read drain request: on is neither true nor false"}
		}
		if err := src.Drain(on); err != nil {
			return nil, httpError{http.StatusInternalServerError, err.Error()}
		}
		return struct{}{}, nil
	})
}

// match finds the service ports that a request means.
func match(services []plan.ServiceStatus, req PinRequest) ([]service.Key, error) {
	var keys []service.Key
	var ports []string
	for i := range services {
		s := &services[i]
		if s.Namespace != req.Namespace || s.Name != req.Name {
			continue
		}
		ports = append(ports, cmp.Or(s.PortName(), "one without a name"))
		if req.Port == "" || s.HasPort(req.Port) {
			keys = append(keys, s.Key())
		}
	}
	switch {
	case len(ports) == 0:
		return nil, fmt.Errorf("there is no service %s/%s; `kproxy status` lists what there is", req.Namespace, req.Name)
	case len(keys) == 0:
		return nil, fmt.Errorf("service %s/%s has no port %q; it has %v", req.Namespace, req.Name, req.Port, ports)
	}
	return keys, nil
}
