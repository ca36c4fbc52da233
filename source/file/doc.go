// Package file reads Kubernetes manifests from files and directories, strictly,
// and watches them.
//
// A manifest is YAML or JSON with any number of documents: v1 Service,
// discovery.k8s.io/v1 EndpointSlice, v1 Endpoints, v1 Node, and lists of them.
// Other kinds are skipped. No API server stands between its author and kproxy,
// so the package does what one would: it refuses unknown and ill-typed fields
// and keys given twice, fills in defaults, and names contradictions, each with
// the file and line of the field.
//
// [Load] reads once. A [Source] goes on watching; a file that stops being valid
// keeps its last valid content in force, as a whole, and a file that is gone
// takes its objects with it.
package file
