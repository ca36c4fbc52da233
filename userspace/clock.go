package userspace

import "time"

// epoch is where sinceEpoch starts: a monotonic clock that fits an atomic.
var epoch = time.Now()

func sinceEpoch() int64 { return int64(time.Since(epoch)) }
