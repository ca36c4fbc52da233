// Package config is what a user can set: one [Config] with its defaults, the
// validation that reports every problem at once, and the parsed form of what
// was written as text.
//
// A [File] is a KubeProxyConfiguration, kube-proxy's configuration file. The
// table [Fields] says of each of its fields what part of a Config it sets, or
// why it is ignored; a test compares the table with the API's types.
//
// The package parses no flags (those are under cmd/) and touches nothing on the
// host but the file that [Read] reads. A Config is a plain value; copies are
// independent but for their slices. A File isn't modified.
package config
