#!/usr/bin/env bash
# Prints the folder of a User Mode Linux: a kernel that is a process of this
# machine, so it has the machine's processor and clock, and is several times
# faster than an emulated one. It is Debian's source with usermode/kernel.config, as
# Debian's own build of it has no nftables for IPv4 and IPv6. The folder holds
# linux, its lib/modules/VERSION (empty), and xstate.so, see usermode/xstate.c.
#
# With 'build' it is built if it isn't there: a quarter of an hour of one
# processor, and 2 GB of disk meanwhile. Several at once wait for the first.
#
# Usage: test/vm/usermode.sh CACHE [build]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1
# Another set of options is another kernel.
folder=$cache/usermode-$(cat "$here"/usermode/{kernel.config,xstate.c} | sha256sum | cut -c1-12)
package=linux-source-6.1

# configured fails, and says why, unless the kernel has all that was asked for.
configured() {
	local missing
	missing=$(grep '=y$' "$here/usermode/kernel.config" | grep -vxFf "$1" || true)
	[[ -z $missing ]] || { echo "vm: Kconfig dropped $missing" >&2; return 1; }
}

build() {
	local part=$folder.part program
	for program in apt-get dpkg cc make flex bison bc xz; do
		command -v $program >/dev/null || { echo "vm: $program is missing; test/setup.sh test installs it" >&2; exit 3; }
	done
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-usermode.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	((EUID != 0)) || chown _apt "$tmp" # who downloads
	cd "$tmp"
	echo "vm: building User Mode Linux, once on this machine" >&2
	apt-get download -q $package || { apt-get update -q && apt-get download -q $package; }
	dpkg -x ./*.deb .
	# Of drivers only what the configuration reads.
	tar -xf usr/src/$package.tar.xz --wildcards --exclude='*/Documentation/*/*' --exclude='*/drivers/gpu/*.[ch]' \
		--exclude='*/drivers/media/*.[ch]' --exclude='*/drivers/net/ethernet/*.[ch]' --exclude='*/drivers/net/wireless/*.[ch]' \
		--exclude='*/sound/*.[ch]' --exclude='*/tools/testing/*'
	cd $package
	make -s ARCH=um KCONFIG_ALLCONFIG="$here/usermode/kernel.config" allnoconfig
	configured .config
	make -s ARCH=um -j "$(nproc)" linux
	rm -rf "$part"
	mkdir -p "$part/lib/modules/$(make -s ARCH=um kernelrelease)"
	strip -o "$part/linux" linux
	cc -O2 -Wall -Werror -shared -fPIC -o "$part/xstate.so" "$here/usermode/xstate.c"
	mv "$part" "$folder"
}

if [[ ! -d $folder && ${2:-} == build ]]; then
	mkdir -p "$cache"
	exec 9>"$cache/usermode-lock"
	flock 9
	[[ -d $folder ]] || (build) >&2
fi
[[ -d $folder ]] && echo "$folder"
