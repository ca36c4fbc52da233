#!/usr/bin/env bash
# Makes sure that user-mode Linux is in the cache, and prints the folder that holds it: linux, and lib/modules/VERSION. It is built of
# Debian's source, by uml.config: Debian's own build has neither nftables for IP nor what makes newer kernels twice as quick (system
# calls are caught by seccomp instead of ptrace). That takes some minutes, once. Several at once wait for the first.
#
# Usage: test/vm/uml.sh CACHE
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1
suite=trixie-backports version=7.2

# apt is Debian's, with sources and lists of its own: the machine's stay as they are.
apt() {
	"apt-$1" -q -o Dir::Etc::SourceList="$tmp/sources" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$tmp/lists" -o Dir::Cache="$tmp/apt" \
		-o APT::Sandbox::User=root "${@:2}"
}

fetch() {
	local name
	mkdir -p "$tmp"/{lists,apt,source}/partial
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$tmp/sources"
	apt get update
	name=linux-source-$version
	apt cache show "$name" >/dev/null 2>&1 || name=$(apt cache depends linux-source | awk '$1 == "Depends:" { print $2; exit }') # the newest
	(cd "$tmp" && apt get download "$name")
	dpkg -x "$tmp/$name"_*.deb "$tmp/package"
	# Without what is large and isn't built. Kconfig wants its own files of all.
	tar -xf "$tmp"/package/usr/src/linux-source-*.tar.xz -C "$tmp/source" --strip-components=1 --exclude='*/Documentation/*/*' --exclude='*/tools/testing/*' \
		--exclude='*/arch/[!ux]*/*.[chS]' --exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/net/ethernet/*.[ch]' --exclude='*/drivers/net/wireless/*.[ch]' \
		--exclude='*/drivers/media/*.[ch]' --exclude='*/drivers/staging/*.[ch]' --exclude='*/drivers/scsi/*.[ch]' --exclude='*/sound/*.[ch]'
}

build() {
	local wanted missing
	make_uml tinyconfig
	wanted=$(sed -n '/^[^#]/s/^/CONFIG_/p' "$here/uml.config")
	echo "$wanted" >>"$tmp/source/.config"
	make_uml olddefconfig
	missing=$(grep -vxFf "$tmp/source/.config" <<<"$wanted" || true)
	[[ -z $missing ]] || { echo "vm: this source of Linux doesn't take from test/vm/uml.config:" $missing; exit 1; }
	make_uml -j"$(nproc)" linux modules
	make_uml INSTALL_MOD_PATH="$tmp/new" modules_install
	rm -f "$tmp"/new/lib/modules/*/build
	cp "$tmp/source/linux" "$tmp/new/"
}

make_uml() { make -s -C "$tmp/source" ARCH=um "$@"; }

exec 9>"$cache/uml-lock"
flock 9
folder=$cache/uml-$(cat "$here"/uml.{sh,config} | sha256sum | cut -c1-12)
if [[ ! -e $folder ]]; then
	echo "vm: building user-mode Linux, which takes minutes once" >&2
	tmp=$(mktemp -d "$cache/uml.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	fetch >&2
	build >&2
	mv "$tmp/new" "$folder"
	find "$cache" -maxdepth 1 -name 'uml-*' -type d -mtime +30 -exec rm -rf {} + # of older configurations
fi
echo "$folder"
