package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"net/http"
	"path"
	"strings"
	"time"
)

// The dashboard's pages. They are served as they are: nothing is built.
//
//go:embed ui
var uiFiles embed.FS

// contentTypes are those of the files there are. Go's own table depends on what
// the host has in /etc/mime.types, and browsers refuse a module of the wrong type.
var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// ui serves the pages: / and what is under /ui/. Browsers keep them, but ask each time:
// another kproxy may be here by then.
func ui(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/")
	if name == "" || name == "ui/" {
		name = "ui/index.html"
	}
	content, err := uiFiles.ReadFile(name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("Content-Type", contentTypes[path.Ext(name)])
	h.Set("ETag", fmt.Sprintf(`W/"%x"`, sha256.Sum256(content)))       // weak: of the content, however it is encoded
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content)) // answers what is conditional, or asks for a range
}
