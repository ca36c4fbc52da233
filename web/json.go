package web

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
)

// errorBody is the JSON of every refusal, read back by Client.
type errorBody struct {
	Error string `json:"error"`
}

// httpError is an error with the HTTP status that says it.
type httpError struct {
	code int
	text string
}

func (e httpError) Error() string { return e.text }

// answer serves what value returns as JSON, or its error.
func answer(value func(w http.ResponseWriter, r *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		v, err := value(w, r)
		var refused httpError
		switch {
		case errors.As(err, &refused):
			refuse(w, refused.code, refused.text)
		case err != nil:
			refuse(w, http.StatusServiceUnavailable, err.Error())
		default:
			writeCompressed(w, r, v)
		}
	}
}

func refuse(w http.ResponseWriter, code int, why string) {
	writeJSON(w, code, errorBody{Error: why})
}

// writeJSON encodes before it writes, so that a value that can't be encoded
// becomes an error status and not half a body.
func writeJSON(w http.ResponseWriter, code int, v any) {
	var b bytes.Buffer
	if err := json.NewEncoder(&b).Encode(v); err != nil {
		b.Reset()
		code = http.StatusInternalServerError
		_ = json.NewEncoder(&b).Encode(errorBody{Error: "encode answer: " + err.Error()})
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(b.Bytes())
}

// worthZipping is how long an answer has to be before compressing it saves a packet.
const worthZipping = 1400

// writeCompressed is writeJSON for answers that may be long, compressed where
// the client takes it.
func writeCompressed(w http.ResponseWriter, r *http.Request, v any) {
	b, err := json.Marshal(v)
	if err != nil || len(b) < worthZipping || !acceptsGzip(r) {
		writeJSON(w, http.StatusOK, v)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Encoding", "gzip")
	w.Header().Set("Vary", "Accept-Encoding")
	_, _ = w.Write(zip(b, gzip.BestSpeed))
}

// acceptsGzip reports whether r's client takes gzip (RFC 9110, section 12.5.3): what
// it says of gzip by name counts, wherever that stands, before what it says of any.
func acceptsGzip(r *http.Request) bool {
	takes := false
	for part := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		coding, weight, _ := strings.Cut(part, ";")
		switch strings.ToLower(strings.TrimSpace(coding)) {
		case "gzip", "x-gzip":
			return weighsSomething(weight)
		case "*":
			takes = weighsSomething(weight)
		}
	}
	return takes
}

// weighsSomething reports whether the weight of a content coding isn't 0; it is 1
// where there is none.
func weighsSomething(weight string) bool {
	value, has := strings.CutPrefix(strings.ToLower(strings.TrimSpace(weight)), "q=")
	if !has {
		return true
	}
	q, err := strconv.ParseFloat(value, 64)
	return err == nil && q > 0
}
