package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"
)

// The dashboard's pages. They are served as they are: nothing is built.
//
//go:embed ui
var uiFiles embed.FS

// asset is a static file, ready to be sent.
type asset struct {
	plain, zipped []byte // zipped is nil where it isn't shorter
	contentType   string
	etag          string
}

// contentTypes are those of the files there are. Go's own table depends on what
// the host has in /etc/mime.types, and browsers refuse a module of the wrong type.
var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// assets compresses once what is served many times.
var assets = sync.OnceValues(func() (map[string]*asset, error) {
	out := map[string]*asset{}
	err := fs.WalkDir(uiFiles, "ui", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := uiFiles.ReadFile(name)
		if err != nil {
			return err
		}
		out[name] = newAsset(name, content)
		return nil
	})
	return out, err
})

func newAsset(name string, content []byte) *asset {
	sum := sha256.Sum256(content)
	a := &asset{plain: content, contentType: contentTypes[path.Ext(name)], etag: hex.EncodeToString(sum[:12])}
	if z := zip(content, gzip.BestCompression); len(z) < len(content) {
		a.zipped = z
	}
	return a
}

// zip returns b as a gzip file.
func zip(b []byte, level int) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, level) // fails only for levels there aren't
	_, _ = w.Write(b)                        // to memory: doesn't fail
	_ = w.Close()
	return out.Bytes()
}

// ui serves the pages: / and what is under /ui/.
func ui(w http.ResponseWriter, r *http.Request) {
	all, err := assets()
	if err != nil {
		refuse(w, http.StatusInternalServerError, "read the dashboard: "+err.Error())
		return
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	if name == "" || name == "ui/" {
		name = "ui/index.html"
	}
	a := all[name]
	if a == nil {
		http.NotFound(w, r)
		return
	}
	a.serve(w, r)
}

// serve sends a, or that the client has it. Browsers keep it, but ask each
// time: another kproxy may be here by then.
func (a *asset) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("Vary", "Accept-Encoding")
	h.Set("Content-Type", a.contentType)
	body, etag := a.plain, a.etag
	if a.zipped != nil && acceptsGzip(r) {
		h.Set("Content-Encoding", "gzip")
		body, etag = a.zipped, a.etag+"-gzip" // other bytes, so another tag (RFC 9110, section 8.8.3)
	}
	h.Set("ETag", `"`+etag+`"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body)) // answers what is conditional, or asks for a range
}
