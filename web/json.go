package web

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
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

// Refusal is an error that is answered with an HTTP status.
func Refusal(code int, format string, args ...any) error {
	return httpError{code, fmt.Sprintf(format, args...)}
}

// answer serves what value returns as JSON, or its error.
func answer(value func(w http.ResponseWriter, r *http.Request) (any, error)) http.HandlerFunc {
	return compressed(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, err := value(w, r)
		var refused httpError
		switch {
		case errors.As(err, &refused):
			refuse(w, refused.code, refused.text)
		case err != nil:
			refuse(w, http.StatusServiceUnavailable, err.Error())
		default:
			writeJSON(w, http.StatusOK, v)
		}
	}))
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

// compressed has h's answers compressed where the client takes that, also piece by piece
// as h flushes them. What isn't 200 it leaves alone: errors are short, and a range (206)
// is of the file as it is.
func compressed(h http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept-Encoding")
		if r.Method == http.MethodHead || !acceptsGzip(r) {
			h.ServeHTTP(w, r)
			return
		}
		z := gzipWriter{ResponseWriter: w}
		h.ServeHTTP(&z, r)
		if z.gzip != nil {
			_ = z.gzip.Close() // the client may as well have gone
			gzipWriters.Put(z.gzip)
		}
	}
}

// gzipWriters are reused: each holds more than a megabyte.
var gzipWriters = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // fails only for levels there aren't
	return w
}}

type gzipWriter struct {
	http.ResponseWriter
	gzip  *gzip.Writer // nil: as it is
	begun bool
}

func (z *gzipWriter) WriteHeader(code int) {
	if !z.begun && code == http.StatusOK {
		z.Header().Set("Content-Encoding", "gzip")
		z.Header().Del("Content-Length")
		z.gzip = gzipWriters.Get().(*gzip.Writer)
		z.gzip.Reset(z.ResponseWriter)
	}
	z.begun = true
	z.ResponseWriter.WriteHeader(code)
}

func (z *gzipWriter) Write(b []byte) (int, error) {
	if !z.begun {
		z.WriteHeader(http.StatusOK)
	}
	if z.gzip == nil {
		return z.ResponseWriter.Write(b)
	}
	return z.gzip.Write(b)
}

// FlushError sends what was written so far. An http.ResponseController flushes by it, and finds the rest by Unwrap.
func (z *gzipWriter) FlushError() error {
	if z.gzip != nil {
		if err := z.gzip.Flush(); err != nil {
			return err
		}
	}
	return http.NewResponseController(z.ResponseWriter).Flush()
}

func (z *gzipWriter) Unwrap() http.ResponseWriter { return z.ResponseWriter }

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
