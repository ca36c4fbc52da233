package trace

import (
	"strings"
	"testing"
	"unicode/utf8"

	"kproxy.dev/kproxy/plan"
)

// TestTextAnswersFirst: verdict and culprit come before everything else, no line is
// wider than asked but for words that are, and colours are there only if asked for.
func TestTextAnswersFirst(t *testing.T) {
	c := usual()
	c.rules = toEndpoints + filterRule("-A FORWARD -d 10.2.0.3/32 -j DROP")
	r := c.trace(t, "10.1.0.2", "10.96.0.10:80", forecasts(onePlan(plan.IPTables), ""))
	for _, width := range []int{60, 80, 200} {
		text := r.Text(Look{Width: width})
		lines := strings.Split(text, "\n")
		if lines[0] != "FORWARDED  tcp 10.96.0.10:80 from 10.1.0.2, outside" || !strings.HasPrefix(lines[1], "Service  default/web (cluster IP)") {
			t.Errorf("it begins with\n%s\n%s", lines[0], lines[1])
		}
		if at := strings.Index(text, "Culprit  on the way to 10.2.0.3:9000"); at < 0 || at > strings.Index(text, "ENDPOINT") {
			t.Errorf("the culprit doesn't come before the endpoints:\n%s", text)
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > width && strings.Contains(strings.TrimSpace(line), " ") && width >= 80 {
				t.Errorf("wider than %d: %q", width, line)
			}
		}
		if strings.Contains(text, "\x1b") {
			t.Error("colours that nobody asked for")
		}
	}
	if coloured := r.Text(Look{Colour: true}); !strings.Contains(coloured, "\x1b[") {
		t.Error("no colours")
	}
}
