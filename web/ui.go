package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"

	"kproxy.dev/kproxy/docs"
)

// The dashboard's pages. They are served as they are: nothing is built.
//
//go:embed ui
var uiFiles embed.FS

// The pages of the dashboard of all nodes, which use files of the other.
//
//go:embed clusterui
var clusterFiles embed.FS

// contentTypes are those of the files there are. Go's own table depends on what
// the host has in /etc/mime.types, and browsers refuse a module of the wrong type.
var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// docPage serves the pages of docs/ as they were written.
func docPage(w http.ResponseWriter, r *http.Request) {
	content, err := docs.Pages.ReadFile(strings.TrimPrefix(r.URL.Path, "/docs/"))
	if err != nil {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

// ui serves the pages: / and what is under /ui/.
func ui(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/")
	if name == "" || name == "ui/" {
		name = "ui/index.html"
	}
	serveFile(w, r, uiFiles, name)
}

// serveFile serves a file. Browsers keep it, but ask each time: another kproxy may be here by then.
func serveFile(w http.ResponseWriter, r *http.Request, files embed.FS, name string) {
	content, err := files.ReadFile(name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("Content-Type", contentTypes[path.Ext(name)])
	if path.Base(name) == "index.html" {
		h.Set("Link", preload(files))
	}
	h.Set("ETag", fmt.Sprintf(`W/"%x"`, sha256.Sum256(content)))       // weak: of the content, however it is encoded
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content)) // answers what is conditional, or asks for a range
}

// preload tells the browser of a page's modules at once (RFC 8288; WHATWG HTML, "modulepreload"), which it else finds one by one.
func preload(files embed.FS) string {
	var links []string
	_ = fs.WalkDir(files, ".", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ".js" && path.Base(name) != "early.js" {
			links = append(links, "<"+name+">; rel=modulepreload")
		}
		return err
	})
	return strings.Join(links, ", ")
}

// ClusterAPI is the handler for the dashboard of all nodes: the pages, and answers in JSON by path. All of it only
// reads, and pages of other origins can't read it.
func ClusterAPI(answers map[string]func(*http.Request) (any, error)) http.Handler {
	long := newSlots(answersAtOnce, answersOfClient)
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", compressed(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serveFile(w, r, clusterFiles, "clusterui/index.html")
	})))
	mux.HandleFunc("/ui/", compressed(http.HandlerFunc(ui)))
	mux.HandleFunc("/clusterui/", compressed(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serveFile(w, r, clusterFiles, strings.TrimPrefix(r.URL.Path, "/"))
	})))
	for path, value := range answers {
		mux.Handle(path, long.bound(answer(func(_ http.ResponseWriter, r *http.Request) (any, error) { return value(r) })))
	}
	return withSecurityHeaders(ownHost(readOnly(mux)))
}
