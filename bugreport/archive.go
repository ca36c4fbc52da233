// Package bugreport makes one archive of what a maintainer asks for when a node misbehaves: what kproxy says, which its
// caller adds, and what the kernel has, which [Report.AddNode] reads, whether or not a kproxy runs. It changes nothing on the host.
//
// An archive is a tar.gz of at most [SizeAtMost] bytes, with a page, index.html, that leads through it. What looks like a
// secret never gets in; a [Mask] replaces addresses and names as well. A Report is for one goroutine.
package bugreport

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"time"
)

const (
	// SizeAtMost bounds an archive, in bytes.
	SizeAtMost = 20 << 20
	// fileAtMost bounds a file in it. What is longer is cut at a line's end, or at a comma if it is one line.
	fileAtMost = 24 << 20
	// pageRoom is left for the page, which comes last.
	pageRoom = 1 << 20
	// excerptAtMost is how much of a short file the page itself shows.
	excerptAtMost = 16 << 10
)

// Config holds what a Report begins with.
type Config struct {
	Node string    // its name
	At   time.Time // when the report was asked for
	End  time.Time // what is added after it is left out; zero for never
	Mask *Mask     // nil for none
	Room int       // bytes; 0 is SizeAtMost
}

// Report is an archive that is being written.
type Report struct {
	to      io.Writer
	cfg     Config
	folder  string
	written int
	files   []entry
	lines   []string // what stands out
	failed  error    // the writer's first error
}

// entry is a file as the page lists it.
type entry struct {
	Name, What string
	Size       int
	Problem    string // why it is missing, or not whole
	Excerpt    string // all of a short one
}

// New begins an archive.
func New(to io.Writer, cfg Config) *Report {
	cfg.Room = cmp.Or(cfg.Room, SizeAtMost)
	return &Report{to: to, cfg: cfg, folder: "kproxy-bugreport-" + cfg.Mask.name(cfg.Node) + "-" + cfg.At.UTC().Format("20060102T150405Z")}
}

// Folder names the folder that the archive consists of.
func (r *Report) Folder() string { return r.folder }

// StandsOut puts a line at the head of the page.
func (r *Report) StandsOut(format string, args ...any) {
	r.lines = append(r.lines, string(r.clean([]byte(fmt.Sprintf(format, args...)))))
}

// clean removes what must not leave the node.
func (r *Report) clean(content []byte) []byte { return r.cfg.Mask.apply(WithoutSecrets(content)) }

// errLate says why something is left out.
var errLate = errors.New("it took too long")

// Add adds a file and what it is about. With err the page says why it isn't there, or isn't whole where there is some content.
func (r *Report) Add(name, what string, content []byte, err error) {
	e := entry{Name: name, What: what}
	if len(content) > 0 && !r.cfg.End.IsZero() && time.Now().After(r.cfg.End) {
		content, err = nil, errLate
	}
	if err != nil {
		e.Problem = string(r.clean([]byte(err.Error())))
	}
	if len(content) > fileAtMost {
		content = content[:fileAtMost]
		content = content[:cmp.Or(bytes.LastIndexByte(content, '\n')+1, bytes.LastIndexByte(content, ',')+1, fileAtMost)] // never within an address
		e.Problem = fmt.Sprintf("cut after %d bytes", len(content))
	}
	if len(content) > 0 {
		content = r.clean(content)
		if r.write(name, content, r.cfg.Room-pageRoom-trailer) {
			e.Size = len(content)
		} else {
			e.Problem = fmt.Sprintf("left out: the archive would be longer than %d bytes", r.cfg.Room)
		}
		if len(content) <= excerptAtMost {
			e.Excerpt = string(content)
		}
	}
	r.files = append(r.files, e)
}

// trailer is more than the end of a tar takes, compressed.
const trailer = 1 << 10

// write adds a file as a gzip member of its own (RFC 1952, 2.2), so that its size is known before it is written, and reports
// whether there was room for it.
func (r *Report) write(name string, content []byte, room int) bool {
	var member bytes.Buffer
	member.Grow(len(content)/8 + 1024)
	z, err := gzip.NewWriterLevel(&member, gzip.BestSpeed)
	if err == nil {
		t := tar.NewWriter(z)
		err = t.WriteHeader(&tar.Header{Name: path.Join(r.folder, name), Mode: 0o600, Size: int64(len(content)), ModTime: r.cfg.At, Format: tar.FormatPAX})
		if err == nil {
			_, err = t.Write(content)
		}
		if err == nil {
			err = t.Flush()
		}
		err = cmp.Or(err, z.Close())
	}
	if err == nil && r.written+member.Len() > room {
		return false
	}
	r.put(member.Bytes(), err)
	return true
}

func (r *Report) put(b []byte, err error) {
	if err == nil && r.failed == nil {
		_, err = r.to.Write(b)
	}
	r.failed = cmp.Or(r.failed, err)
	r.written += len(b)
}

// Close adds the page and ends the archive.
func (r *Report) Close() error {
	text, err := r.page()
	if err != nil {
		return fmt.Errorf("write the report's page: %w", err)
	}
	if !r.write("index.html", text, r.cfg.Room-trailer) { // files without excerpts fit
		for i := range r.files {
			r.files[i].Excerpt = ""
		}
		if text, err = r.page(); err != nil {
			return fmt.Errorf("write the report's page: %w", err)
		}
		r.write("index.html", text, r.cfg.Room-trailer)
	}
	var end bytes.Buffer
	z := gzip.NewWriter(&end)
	err = cmp.Or(tar.NewWriter(z).Close(), z.Close())
	r.put(end.Bytes(), err)
	if r.failed != nil {
		return fmt.Errorf("write the report: %w", r.failed)
	}
	return nil
}
