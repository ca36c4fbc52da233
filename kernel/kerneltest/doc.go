// Package kerneltest holds what every kernel mode's tests share: the
// conformance walk that each backend must pass, a model of the host that stands
// in for the kernel, faults to put in front of either, plans to render, and
// network namespaces to do it in.
//
// It is for tests only.
package kerneltest
