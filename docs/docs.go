// Package docs holds the pages of this folder, which the dashboard links to.
package docs

import "embed"

// Pages are the pages, Markdown.
//
//go:embed *.md
var Pages embed.FS
