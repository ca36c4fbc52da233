package node

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The files in --state-dir.
const (
	pinsFile  = "pins.json"
	drainFile = "drained.json"
	// APIStateFile has what the Kubernetes API said last.
	APIStateFile = "api-state.zip"
	// EjectionsFile has what is ejected: the next kproxy of this node begins with that.
	EjectionsFile = "ejected.json"
	// FlowsFile says which endpoints clients have. A kproxy leaves it that ends with no other one taking over.
	FlowsFile = "flows.cbor"
)

// StateFiles are all of them.
var StateFiles = []string{pinsFile, drainFile, APIStateFile, EjectionsFile, FlowsFile}

// ReplaceFile replaces a file by rename, so a crash leaves the old or the new one, and
// has both on the disk before it returns: a rename can get there before the content.
func ReplaceFile(path string, content []byte) error {
	tmp := path + ".new"
	if err := writeSynced(tmp, content); err != nil {
		os.Remove(tmp) // the disk may be full
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(path))
}

func writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDirectory writes a directory's entries to the disk. Some file systems have no
// such thing and say EINVAL (fsync(2)).
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	if err = d.Sync(); errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, d.Close())
}
