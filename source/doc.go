// Package source turns Kubernetes objects into the service.Snapshot that
// everything downstream reads. The conversion is pure and is shared by the
// sources that obtain such objects: files (source/file) and the Kubernetes API.
//
// [Build] is as forgiving as kube-proxy: what it can't use it leaves out,
// because an API server has checked its objects before. Objects written by
// hand go through [Default] and [Validate] first, which do for them what an
// API server does: fill in defaults, and name every contradiction.
//
// All functions are pure and safe for concurrent use; none modifies the
// objects given to it, except Default.
package source
