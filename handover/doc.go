// Package handover is what a kproxy gives to the one that takes over from it, as messages of
// protobuf: two releases may be at the two ends, and either knows fields that the other one doesn't.
// handover.proto says what they mean, and by which rules they may change. What a process leaves that crashes is another matter, and its keeper's.
package handover
