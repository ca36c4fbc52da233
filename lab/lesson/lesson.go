// Package lesson holds the lessons of `kproxy lab lesson`: Markdown to read, with tasks that a shell
// checks on what really is in the lab.
//
// A lesson is a file. Its first heading is its title, a line "mode: M" after that the mode of the
// lab's kproxy. Each further heading begins a task: paragraphs to read, and blocks of code, of which
// the language says what they are for:
//
//	sh        what the learner is told to run
//	when      the task is left out where this fails
//	setup     is run when the task is first shown
//	check     the task is done once this ends with status 0; what it prints says what it saw, or what is missing
//	answer    the task is a question, and this prints the right answers, one a line
//	solution  what to run, where sh doesn't say it: for teachers, for tests, and for who skips the task
//
// A paragraph that begins with "Look for: " stands behind the block sh. [Tour] is the same as a template, for what depends on the lab.
//
// The package reads files that are part of the program, and runs nothing. It is safe for concurrent use.
package lesson

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
	"text/template"
)

// Lesson is one of the lessons.
type Lesson struct {
	Title string
	Mode  string // of kproxy
	Tasks []Task
}

// Task describes what to read and to do. It has either a check or an answer.
type Task struct {
	Title    string
	Text     []string // paragraphs
	Commands []string // lines of the block sh
	Look     string   // what to look for then
	// Blocks are the others, by their languages.
	Blocks map[string]string
}

//go:embed *.md tour.md.tmpl
var files embed.FS

// Tour returns what there is to try in a lab that a program describes.
func Tour(lab any) ([]Task, error) {
	t, err := template.ParseFS(files, "tour.md.tmpl")
	if err != nil {
		return nil, fmt.Errorf("read tour: %w", err)
	}
	var text strings.Builder
	if err := t.Execute(&text, lab); err != nil {
		return nil, fmt.Errorf("write tour: %w", err)
	}
	l, err := parse(text.String())
	return l.Tasks, err
}

// All returns the lessons in their order.
func All() ([]Lesson, error) {
	names, err := fs.Glob(files, "*.md")
	if err != nil {
		return nil, fmt.Errorf("list lessons: %w", err)
	}
	var out []Lesson
	for _, name := range names {
		b, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read lesson: %w", err)
		}
		l, err := parse(string(b))
		if err != nil {
			return nil, fmt.Errorf("lesson %s: %w", name, err)
		}
		out = append(out, l)
	}
	return out, nil
}

// languages are those of blocks.
var languages = map[string]bool{"sh": true, "when": true, "setup": true, "check": true, "answer": true, "solution": true}

func parse(text string) (l Lesson, err error) {
	var paragraph []string
	flush := func() {
		if len(paragraph) > 0 && len(l.Tasks) > 0 {
			t := &l.Tasks[len(l.Tasks)-1]
			if look, ok := strings.CutPrefix(strings.Join(paragraph, " "), "Look for: "); ok {
				t.Look = look
			} else {
				t.Text = append(t.Text, strings.Join(paragraph, " "))
			}
		}
		paragraph = nil
	}
	block, language := []string(nil), "" // of the block that the line is in
	for n, line := range strings.Split(text, "\n") {
		switch fence, isFence := strings.CutPrefix(line, "```"); {
		case isFence && language != "":
			t := &l.Tasks[len(l.Tasks)-1]
			if language == "sh" {
				t.Commands = append(t.Commands, block...)
			} else {
				t.Blocks[language] = strings.Join(block, "\n")
			}
			block, language = nil, ""
		case language != "":
			block = append(block, line)
		case isFence && (!languages[fence] || len(l.Tasks) == 0):
			return l, fmt.Errorf("line %d: a block of %q, or before the first task", n+1, fence)
		case isFence:
			flush()
			language = fence
		case strings.HasPrefix(line, "## "):
			flush()
			l.Tasks = append(l.Tasks, Task{Title: line[3:], Blocks: map[string]string{}})
		case strings.HasPrefix(line, "# "):
			l.Title = line[2:]
		case strings.HasPrefix(line, "mode: "):
			l.Mode = line[6:]
		case line == "":
			flush()
		default:
			paragraph = append(paragraph, line)
		}
	}
	flush()
	for i := range l.Tasks {
		if t := &l.Tasks[i]; len(t.Text)+len(t.Look) == 0 || (t.Blocks["check"] == "") == (t.Blocks["answer"] == "") {
			return l, fmt.Errorf("task %q has nothing to read, or not one of check and answer", t.Title)
		}
	}
	if l.Title == "" || l.Mode == "" || language != "" || len(l.Tasks) == 0 {
		return l, fmt.Errorf("it lacks a title, a mode, a task or the end of a block")
	}
	return l, nil
}
