// Package kerneltest holds what the tests of every kernel data plane share:
//
//   - [Conformance], which each backend must pass on the kernel, and that of IPVS
//     on a model of it as well: random walks with faults and deaths, among
//     foreign objects;
//   - [Packets], which each data plane must pass with real packets;
//   - what these are made of: a model that stands in for the kernel where that
//     has no IPVS ([Host]), faults to put in front of either ([Faults]), plans to render, and network
//     namespaces to do it in ([Network]).
//
// It is for tests only.
package kerneltest
