#!/usr/bin/env bash
# Prints what today's kproxy takes over from, and back: the tag of the last release before this commit; until there is one, the
# first commit of that promise (docs/upgrades.md), which then goes from here. It fails where the clone is too shallow for that.
set -euo pipefail
cd "$(dirname "$0")/.."
git describe --tags --abbrev=0 --match='v[0-9]*' --exclude='*-*' HEAD^ 2>/dev/null || git rev-parse --quiet --verify '95e9e23^{commit}'
