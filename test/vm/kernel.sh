#!/usr/bin/env bash
# Makes sure that Debian's stock kernel is unpacked in the cache, and prints the
# folder that holds it: vmlinuz, and lib/modules/VERSION. Nothing is installed.
# Several at once wait for the first.
#
# Usage: test/vm/kernel.sh
set -euo pipefail

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-vm

# package prints the name of the package that linux-image-amd64 stands for now.
package() { apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }'; }

update() {
	echo "vm: fetching the package lists" >&2
	apt-get update -q >&2
}

# fetch PACKAGE FOLDER unpacks the package into FOLDER.
fetch() {
	# apt downloads as the user _apt, who can't enter the cache of root.
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-fetch.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	((EUID != 0)) || chown _apt "$tmp"
	echo "vm: fetching $1" >&2
	# The lists may be older than the archive, which keeps only the newest.
	(cd "$tmp" && { apt-get download -q "$1" || { update && apt-get download -q "$1"; }; }) >&2
	rm -rf "$2.part"
	mkdir -p "$2.part"
	dpkg -x "$tmp"/*.deb "$2.part"
	mv "$2.part"/boot/vmlinuz-* "$2.part/vmlinuz"
	depmod -b "$2.part" "$(ls "$2.part/lib/modules")"
	mv "$2.part" "$2"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9

name=$(package)
if [[ -z $name ]]; then
	update
	name=$(package)
fi
[[ -n $name ]] || { echo "vm: apt knows no linux-image-amd64; kproxy's VM boots Debian's kernel" >&2; exit 3; }
[[ -d $cache/$name ]] || fetch "$name" "$cache/$name"
echo "$cache/$name"
