// Package handover is what a kproxy gives to the one that takes over from it: messages in CBOR ([Message]), with descriptors beside them
// ([Conn]). What a process leaves that crashes is another matter, and its keeper's ([StartKeeper]).
package handover
