package web

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"net/http"
)

// errorBody is the JSON of every refusal, read back by Client.
type errorBody struct {
	Error string `json:"error"`
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
