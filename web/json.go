package web

import (
	"bytes"
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
