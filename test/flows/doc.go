// Package flows holds the flow matrix: who reaches which endpoints of a Service,
// and as whom. matrix.txtar is the matrix itself, to be read by people; [Parse]
// reads it for tests. It knows nothing of how kproxy does it: tests of the plan
// and tests with real packets check it each in their way.
package flows
