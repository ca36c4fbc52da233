// Package config is what a user can set: one [Config] with its defaults, the
// validation that reports every problem at once, and the parsed form of what
// was written as text.
//
// It parses no flags (those are under cmd/) and touches nothing on the host. A
// Config is a plain value; copies are independent but for their slices.
package config
