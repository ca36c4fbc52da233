#!/usr/bin/env bash
# Prints a release's notes: what the changelog says of VERSION, or what is unreleased when that is
# none of the form vX.Y.Z.
#
# KPROXY_PAGES comes before docs/ in the links.
set -euo pipefail
cd "$(dirname "$0")/.."
section=Unreleased
if [[ ${VERSION:?is the tag} =~ ^v([0-9]+\.[0-9]+\.[0-9]+)$ ]]; then section=${BASH_REMATCH[1]}; fi
awk -v section="$section" '
	/^## / { on = $2 == section; found = found || on && section == "Unreleased"; next } # nothing may be unreleased
	on { print; found = found || NF }
	END { exit !found }' CHANGELOG.md | sed -E "s|\]\((docs/[^)]*)\)|](${KPROXY_PAGES:-}\1)|g" ||
	{ echo "CHANGELOG.md says nothing below '## $section'" >&2; exit 1; }
