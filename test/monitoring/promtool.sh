#!/usr/bin/env bash
# Prints the path of a promtool: the one in PATH, or Debian's, which is unpacked
# into $XDG_CACHE_HOME/kproxy-promtool (~/.cache/kproxy-promtool) if it isn't there.
# Debian's package prometheus isn't installed: it would start a server. Several at
# once wait for the first.
set -euo pipefail

if command -v promtool; then
	exit
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-promtool
promtool=$cache/promtool
if [[ ! -x $promtool ]]; then
	for program in apt-get dpkg-deb; do
		command -v $program >/dev/null || {
			echo "promtool is missing, and there is no $program to fetch Debian's with; put one into PATH" >&2
			exit 3
		}
	done
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock 9
fi
if [[ ! -x $promtool ]]; then
	# apt downloads as the user _apt, who can't enter the cache of root.
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-promtool.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	((EUID != 0)) || chown _apt "$tmp"
	echo "fetching promtool" >&2
	# No lists, or older ones than the archive, which keeps only the newest packages.
	(cd "$tmp" && { apt-get download -q prometheus || { ((EUID == 0)) && apt-get update -q && apt-get download -q prometheus; }; }) >&2
	dpkg-deb --fsys-tarfile "$tmp"/*.deb | tar -xO ./usr/bin/promtool >"$cache/new"
	chmod 755 "$cache/new"
	mv "$cache/new" "$promtool"
fi
echo "$promtool"
