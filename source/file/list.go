package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"kproxy.dev/kproxy/source"
)

// found is a manifest as a listing found it.
type found struct {
	name string // as messages name it: below the path as the user wrote it, quoted where a terminal would take it for more
	file string // to be opened
	path string // the configured path it belongs to
	info fs.FileInfo
	err  error // in place of info
}

// list returns the manifests at path: itself if it is a file, or the files in
// it, by name. Directories inside of it are not descended into; a ConfigMap
// volume holds several that would repeat every file.
func list(path string) ([]found, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []found{{name: source.Plain(filepath.Clean(path)), file: path, path: path, info: info}}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var files []found
	for _, e := range entries {
		if !isManifest(e.Name()) {
			continue
		}
		file := filepath.Join(path, e.Name())
		f := found{name: source.Plain(file), file: file, path: path}
		f.info, f.err = os.Stat(file) // what a symbolic link leads to
		if f.err == nil && f.info.IsDir() {
			continue
		}
		files = append(files, f)
	}
	return files, nil
}

// isManifest reports whether a file of this name in a directory is read.
// Hidden files and editors' backup and lock files are not.
func isManifest(name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "#") {
		return false
	}
	return slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// gone reports whether err says that there is no such file, rather than that
// it can't be reached now.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// signature differs, without reading the file, where its content may: unless a change
// came less than racy after the last, as times of files are coarse.
type signature struct {
	size, mtime, ctime int64
	dev, ino           uint64
}

// racy is more than the resolution of a file's times, 10 ms where HZ is 100.
const racy = time.Second

func signatureOf(info fs.FileInfo) signature {
	s := signature{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.ctime, s.dev, s.ino = st.Ctim.Nano(), st.Dev, st.Ino
	}
	return s
}
