package web

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path"
	"regexp"
	"strings"
	"testing"
)

// fetch asks for a path with headers.
func fetch(h http.Handler, path string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func gunzip(t *testing.T, b []byte) []byte {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestEveryFileOfTheDashboardIsServed(t *testing.T) {
	h := api(shop())
	err := fs.WalkDir(uiFiles, "ui", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if _, known := contentTypes[path.Ext(name)]; !known {
			t.Errorf("%s: files of its kind have no content type here", name)
		}
		want, err := uiFiles.ReadFile(name)
		if err != nil {
			return err
		}
		plain, zipped := fetch(h, "/"+name), fetch(h, "/"+name, "Accept-Encoding", "br, gzip")
		if plain.Code != http.StatusOK || !bytes.Equal(plain.Body.Bytes(), want) || plain.Header().Get("Content-Type") == "" {
			t.Errorf("%s: got %d with %d bytes of %q", name, plain.Code, plain.Body.Len(), plain.Header().Get("Content-Type"))
		}
		body := zipped.Body.Bytes()
		if zipped.Header().Get("Content-Encoding") == "gzip" {
			body = gunzip(t, body)
			if tag := zipped.Header().Get("ETag"); tag == plain.Header().Get("ETag") && !strings.HasPrefix(tag, "W/") {
				t.Errorf("%s: two encodings share the strong tag %s", name, tag)
			}
		}
		if !bytes.Equal(body, want) {
			t.Errorf("%s: compressed, it is another file", name)
		}
		part := fetch(h, "/"+name, "Range", "bytes=1-9", "Accept-Encoding", "gzip")
		if part.Code != http.StatusPartialContent || !bytes.Equal(part.Body.Bytes(), want[1:10]) || part.Header().Get("Content-Encoding") != "" {
			t.Errorf("%s: of a range, got %d with %q, encoded as %q", name, part.Code, part.Body, part.Header().Get("Content-Encoding"))
		}
		for _, w := range []*httptest.ResponseRecorder{plain, zipped} {
			encoding := "identity"
			if w.Header().Get("Content-Encoding") != "" {
				encoding = "gzip"
			}
			again := fetch(h, "/"+name, "If-None-Match", w.Header().Get("ETag"), "Accept-Encoding", encoding)
			if again.Code != http.StatusNotModified || again.Body.Len() != 0 {
				t.Errorf("%s, %s: a client that has it gets %d with %d bytes, want 304", name, encoding, again.Code, again.Body.Len())
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What the policy of guard.go forbids would be missing in the browser only.
func TestNothingIsInlineOrFromElsewhere(t *testing.T) {
	forbidden := []*regexp.Regexp{
		regexp.MustCompile(`<script(?:\s[^>]*)?>[^<]`),
		regexp.MustCompile(`<style`),
		regexp.MustCompile(`\sstyle=`),
		regexp.MustCompile(`\son[a-z]+=`),
		regexp.MustCompile(`(?:src|href)="(?:https?:)?//`),
	}
	err := fs.WalkDir(uiFiles, "ui", func(name string, d fs.DirEntry, err error) error {
		if err != nil || path.Ext(name) != ".html" {
			return err
		}
		b, err := uiFiles.ReadFile(name)
		if err != nil {
			return err
		}
		for _, re := range forbidden {
			if m := re.Find(b); m != nil {
				t.Errorf("%s has %q, which browsers don't follow here", name, m)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestPathsThatAreNoFiles(t *testing.T) {
	h := api(shop())
	for _, p := range []string{"/ui/none.js", "/ui/css", "/ui/css/", "/ui", "/index.html", "/ui/%2e%2e/guard.go", "/ui/..%2fguard.go"} {
		if w := fetch(h, p); w.Code == http.StatusOK {
			t.Errorf("%s: got 200, %.80q", p, w.Body)
		}
	}
}

func TestAcceptsGzip(t *testing.T) {
	for header, want := range map[string]bool{
		"": false, "gzip": true, "GZIP": true, "br, gzip": true, "gzip;q=0": false, "gzip; q=0.5": true, "gzip;q=x": false,
		"*": true, "identity": false, "br;q=1.0,*;q=0": false, "xgzip": false,
		"*;q=0, gzip": true, "*, gzip;q=0": false, "gzip;Q=0": false, "gzip ; q=0.000": false, "x-gzip": true,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Accept-Encoding", header)
		if got := acceptsGzip(r); got != want {
			t.Errorf("%q: got %t, want %t", header, got, want)
		}
	}
}

func TestLongAnswersAreCompressed(t *testing.T) {
	h := api(bigCluster(100))
	plain := fetch(h, "/api/v1/history?service=team-0/svc-0001:http")
	if plain.Header().Get("Content-Encoding") != "" {
		t.Error("compressed for a client that didn't ask for it")
	}
	query := "?service=x"
	for i := range 100 {
		query += "&service=team-0/svc-00" + string(rune('0'+i/10)) + string(rune('0'+i%10)) + ":http"
	}
	long := fetch(h, "/api/v1/history"+query, "Accept-Encoding", "gzip")
	if long.Header().Get("Content-Encoding") != "gzip" || !bytes.Contains(gunzip(t, long.Body.Bytes()), []byte(`"team-0/svc-0099:http"`)) {
		t.Errorf("got %q, want gzip with all of them", long.Header().Get("Content-Encoding"))
	}
}

// A browser finds out what a module imports only when it has read it: without the
// list, one level of imports waits for the other.
func TestEveryModuleIsLoadedAtOnce(t *testing.T) {
	w := fetch(api(shop()), "/")
	err := fs.WalkDir(uiFiles, "ui", func(name string, d fs.DirEntry, err error) error {
		if err == nil && path.Ext(name) == ".js" && !mentioned(w, name) {
			t.Errorf("the page names %s neither as a script nor to be preloaded", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// mentioned reports whether a page refers to a file: as a script or style, or to be preloaded.
func mentioned(page *httptest.ResponseRecorder, file string) bool {
	return strings.Contains(page.Header().Get("Link"), "<"+file+">; rel=modulepreload") || regexp.MustCompile(`="/?`+regexp.QuoteMeta(file)+`"`).Match(page.Body.Bytes())
}

func equalAddrPort(a, b netip.AddrPort) bool { return a == b }

func contextWith(ctx context.Context, key, value any) context.Context {
	return context.WithValue(ctx, key, value)
}

// The dashboard of all nodes keeps to the same: each file is served and preloaded, nothing is inline or from elsewhere, all
// addresses are relative, and what changes something or comes under a foreign name is refused.
func TestClusterPages(t *testing.T) {
	h := ClusterAPI(map[string]func(*http.Request) (any, error){"/api/v1/summary": func(*http.Request) (any, error) { return 1, nil }})
	page := fetch(h, "/")
	index := page.Body.String()
	if regexp.MustCompile(`(?:src|href)="(?:/|https?:)|<style|\sstyle=|\son[a-z]+=|<script(?:\s[^>]*)?>[^<]`).MatchString(index) {
		t.Error("the page has something inline, from elsewhere, or by an absolute path")
	}
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"#?]+)"`).FindAllStringSubmatch(index, -1) {
		if w := fetch(h, "/"+m[1]); w.Code != http.StatusOK && m[1] != "api/v1/nodes" {
			t.Errorf("%s: %d", m[1], w.Code)
		}
	}
	entries, err := uiFiles.ReadDir("clusterui")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if path.Ext(e.Name()) != ".html" && !mentioned(page, "clusterui/"+e.Name()) {
			t.Errorf("the page names %s neither as a script nor to be preloaded", e.Name())
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/api/v1/summary", nil)
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, r); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
	r = httptest.NewRequest(http.MethodGet, "/api/v1/summary", nil)
	r.Host = "evil.example"
	r = r.WithContext(contextWith(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
	w = httptest.NewRecorder()
	if h.ServeHTTP(w, r); w.Code != http.StatusForbidden {
		t.Errorf("a foreign host: %d", w.Code)
	}
}
