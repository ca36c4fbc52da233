package lockfile

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestFileIsRemoved: the file goes with its lock, and still one at a time holds it.
func TestFileIsRemoved(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "lock")
	var holders, taken atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 2000 {
				lock, err := Take(path)
				if _, held := errors.AsType[*Held](err); held {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d hold the lock", n)
				}
				taken.Add(1)
				for range 20 {
					runtime.Gosched() // long enough for another to have opened the file before
				}
				holders.Add(-1)
				if err := Release(lock); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || taken.Load() == 0 {
		t.Errorf("left %v (%v), taken %d times", left, err, taken.Load())
	}
}
