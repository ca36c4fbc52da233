#!/usr/bin/env bash
# Writes an initramfs to standard output: busybox, the modules that reach the
# host's files, and init.sh.
#
# Usage: test/vm/initramfs.sh KERNEL-FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernel=$1
version=$(ls "$kernel/lib/modules")

root=$(mktemp -d "${TMPDIR:-/tmp}/kproxy-vm-initramfs.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,host,rw,new,modules}
cp "$(command -v busybox)" "$root/bin/busybox"
if ldd "$root/bin/busybox" >/dev/null 2>&1; then
	echo "vm: busybox needs libraries; the VM starts with a static one, Debian's busybox-static" >&2
	exit 3
fi
cp "$here/init.sh" "$root/init"
chmod 755 "$root/init"

: >"$root/modules/order"

# modprobe names what each needs before it, as 'insmod PATH' or 'builtin NAME'. User-mode Linux, which is no file here, reaches the host's
# files without.
modules=(overlay)
[[ ! -e $kernel/vmlinuz ]] || modules+=(virtio_pci 9pnet_virtio 9p)
for module in "${modules[@]}"; do
	modprobe --show-depends -d "$kernel" -S "$version" "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
	name=${path##*/}
	name=${name%.ko*}.ko
	case $path in # as other distributions pack them
	*.xz) xz -dc "$path" ;;
	*.zst) zstd -dc "$path" ;;
	*.gz) gzip -dc "$path" ;;
	*) cat "$path" ;;
	esac >"$root/modules/$name"
	echo "$name" >>"$root/modules/order"
done

cd "$root"
find . | busybox cpio -o -H newc 2>/dev/null
