// Package strict reads YAML and JSON that people have written, and finds every
// mistake with its line.
//
// A document becomes a tree of [Node]s, each with its line. [Check] compares a
// tree with the Go type it is to be decoded into, as strictly as the Kubernetes
// API server does with fieldValidation=Strict, and reports all that doesn't fit
// at once; [Node.Decode] then fills a value. Everything is plain data and
// functions of their arguments but for [Read], which reads one file.
//
// goccy/go-yaml, which gives lines too, doesn't spare it: it ends at the first mistake and takes
// a number for a string without a word. sigs.k8s.io/yaml gives no lines.
package strict
