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

// The pages of the dashboard, and those of the one of all nodes, which use files of the other. They are served as they are:
// nothing is built.
//
//go:embed ui clusterui
var uiFiles embed.FS

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

// ui serves the pages, index at /. Browsers keep them, but ask each time: another kproxy may be here by then.
func ui(index string) http.HandlerFunc {
	return compressed(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		switch name {
		case "":
			name = index
		case "ui/":
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
		if path.Base(name) == "index.html" {
			h.Set("Link", preload(path.Dir(name)))
		}
		h.Set("ETag", fmt.Sprintf(`W/"%x"`, sha256.Sum256(content)))       // weak: of the content, however it is encoded
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content)) // answers what is conditional, or asks for a range
	}))
}

// preload tells the browser of a page's modules at once (RFC 8288; WHATWG HTML, "modulepreload"), which it else finds one by one.
func preload(folder string) string {
	var links []string
	_ = fs.WalkDir(uiFiles, folder, func(name string, _ fs.DirEntry, err error) error {
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
	pages := ui("clusterui/index.html")
	mux.HandleFunc("/{$}", pages)
	mux.HandleFunc("/ui/", pages)
	mux.HandleFunc("/clusterui/", pages)
	for path, value := range answers {
		mux.Handle(path, long.bound(answer(func(_ http.ResponseWriter, r *http.Request) (any, error) { return value(r) })))
	}
	return withSecurityHeaders(ownHost(readOnly(mux)))
}
