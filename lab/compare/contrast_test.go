package compare

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// luminance is WCAG's relative luminance of a colour such as #1b1f24.
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	n, err := strconv.ParseUint(strings.TrimPrefix(colour, "#"), 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	linear := func(v uint64) float64 {
		c := float64(v&255) / 255
		if c <= 0.04045 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(n>>16) + 0.7152*linear(n>>8) + 0.0722*linear(n)
}

// Texts have the contrast of WCAG AA (4.5), and so have drawings theirs (3),
// in light and dark.
func TestContrast(t *testing.T) {
	blocks := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(pageText, -1)
	if len(blocks) != 2 {
		t.Fatalf("%d blocks of colours, want a light and a dark one", len(blocks))
	}
	for i, scheme := range []string{"light", "dark"} {
		colours := map[string]string{}
		for _, m := range regexp.MustCompile(`--([a-z0-9]+): (#[0-9a-f]{6})`).FindAllStringSubmatch(blocks[i][1], -1) {
			colours[m[1]] = m[2]
		}
		for name, colour := range colours {
			least := 3.0
			switch name {
			case "page", "box", "line":
				continue
			case "text", "quiet", "link":
				least = 4.5
			}
			for _, ground := range []string{"page", "box"} {
				a, b := luminance(t, colour), luminance(t, colours[ground])
				if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < least {
					t.Errorf("%s: %s on %s has a contrast of %.2f, want %.1f", scheme, name, ground, ratio, least)
				}
			}
		}
	}
}
