#!/usr/bin/env bash
# Makes sure that Debian's stock kernel is unpacked in the cache, and prints the
# folder that holds it: vmlinuz, and lib/modules/VERSION. Nothing is installed.
# Several at once wait for the first.
#
# Usage: test/vm/kernel.sh CACHE
set -euo pipefail

cache=$1
stands=${KPROXY_VM_PACKAGE:-linux-image-amd64}

# package prints the name of the package that the given one stands for now.
package() { apt-cache depends "$stands" 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }'; }

download() {
	echo "vm: fetching $1" >&2
	(cd "$tmp" && apt-get download -q "$1") >&2
}

# unpack FOLDER makes the folder whole or not at all.
unpack() {
	rm -rf "$1.part"
	mkdir "$1.part"
	dpkg -x "$tmp"/*.deb "$1.part"
	mv "$1.part"/boot/vmlinuz-* "$1.part/vmlinuz"
	depmod -b "$1.part" "$(ls "$1.part/lib/modules")"
	mv "$1.part" "$1"
}

for program in apt-get dpkg; do
	command -v $program >/dev/null || {
		echo "vm: no $program to fetch Debian's kernel with; set KPROXY_VM_KERNEL to a folder with another's vmlinuz and lib/modules" >&2
		exit 3
	}
done
exec 9>"$cache/lock"
flock 9

name=$(package)
if [[ -z $name || ! -d $cache/$name ]]; then
	# apt downloads as the user _apt, who can't enter the cache of root.
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-kernel.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	((EUID != 0)) || chown _apt "$tmp"
	# No lists, or older ones than the archive, which keeps only the newest packages.
	if [[ -z $name ]] || ! download "$name"; then
		echo "vm: fetching the package lists" >&2
		apt-get update -q >&2
		name=$(package)
		[[ -n $name ]] || { echo "vm: apt knows no $stands; the VM boots Debian's kernel" >&2; exit 3; }
		download "$name"
	fi
	unpack "$cache/$name"
fi
echo "$cache/$name"
