// Package screen draws what a running kproxy does on a terminal: the screen of
// `kproxy status --watch` and of `kproxy lab up`, with the pages of services.
//
// It is pure. A [Model] takes in what happens (a status, an event, a key) and
// [Model.Render] gives the lines for a screen of a given size at a given time,
// none of them wider and not more of them than that. Who reads the keyboard and
// writes to the terminal is package cmd/kproxy/screen/terminal.
//
// What matters is never said by colour alone: it has a shape or a word as well.
//
// A Model belongs to one goroutine.
package screen
