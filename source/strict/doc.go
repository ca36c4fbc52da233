// Package strict reads YAML and JSON that people have written, and finds every
// mistake with its line.
//
// [Documents] makes a tree of [Node]s of each document, each node with its
// line. [Node.Decode] fills a Go value from a tree as strictly as the Kubernetes
// API server does with fieldValidation=Strict, and reports all that doesn't fit
// at once. Syntax and values are read by the decoders that Kubernetes uses; what
// is done here is to say where. Everything is plain data and functions of their
// arguments but for [Read], which reads one file.
//
// goccy/go-yaml, which gives lines too, doesn't spare it: it ends at the first mistake and takes
// a number for a string without a word. sigs.k8s.io/yaml gives no lines.
package strict
