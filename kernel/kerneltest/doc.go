// Package kerneltest holds what every kernel mode's tests share:
//
//   - [Conformance], which each backend must pass on a model of the host and on
//     the kernel: random walks with faults and deaths, drains, foreigners and
//     vandals;
//   - [Flows], which each mode must pass with real packets, by one table;
//   - [RulesMatchPlan], which follows packets through what is rendered;
//   - what these are made of: a model that stands in for the kernel ([Host]),
//     faults to put in front of either ([Faults]), plans to render, and network
//     namespaces to do it in ([Network]).
//
// It is for tests only.
package kerneltest
