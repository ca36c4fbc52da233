package lesson

import (
	"strings"
	"testing"
)

// TestAll: there are seven lessons, each has tasks to answer and, but for what is only read, tasks to do.
func TestAll(t *testing.T) {
	lessons, err := All()
	if err != nil {
		t.Fatal(err)
	}
	if len(lessons) != 7 {
		t.Fatalf("%d lessons, want 7", len(lessons))
	}
	faults := 0
	for _, l := range lessons {
		kinds := map[string]int{}
		for _, task := range l.Tasks {
			for kind := range task.Blocks {
				kinds[kind]++
			}
			if strings.Contains(task.Title, "find it") && task.Blocks["setup"] != "" {
				faults++
			}
		}
		if kinds["answer"] == 0 || kinds["check"] == 0 {
			t.Errorf("%s: %v", l.Title, kinds)
		}
	}
	if faults != 6 {
		t.Errorf("%d faults are planted, want 6", faults)
	}
}

func TestParse(t *testing.T) {
	const good = "# A\n\nmode: auto\n\n## B\n\nRead\nthis.\n\nAnd this.\n\n```sh\none\ntwo\n```\n\n```check\ntrue\n```\n"
	l, err := parse(good)
	if err != nil || len(l.Tasks) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	if task := l.Tasks[0]; strings.Join(task.Text, "|") != "Read this.|And this." || strings.Join(task.Commands, "|") != "one|two" || task.Blocks["check"] != "true" {
		t.Errorf("%+v", task)
	}
	for name, bad := range map[string]string{
		"no mode":              strings.Replace(good, "mode: auto", "", 1),
		"no title":             strings.Replace(good, "# A", "", 1),
		"an unknown block":     strings.Replace(good, "```sh", "```shell", 1),
		"no check":             strings.Replace(good, "```check\ntrue\n```", "", 1),
		"check and answer":     good + "\n```answer\necho 1\n```\n",
		"nothing to read":      strings.NewReplacer("Read\nthis.", "", "And this.", "").Replace(good),
		"an open block":        good + "\n```setup\nx\n",
		"a block before tasks": "```sh\nx\n```\n" + good,
	} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%s is parsed", name)
		}
	}
}
