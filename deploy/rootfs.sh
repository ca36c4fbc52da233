#!/bin/sh
# Makes the root file system of kproxy's image, all but kproxy itself: iptables in
# both variants, ipset, and what they need to run, from Debian's packages. There is
# no shell in it and no package manager. Runs on Debian, as root; it is a stage of
# deploy/Dockerfile and a part of the test of deploy/.
#
# Usage: rootfs.sh DIRECTORY [nftables]   # nftables: without programs, for mode nftables alone
#
# KPROXY_ARCH is another processor than this machine's.
set -eu
root=$1
here=$(dpkg --print-architecture)
arch=${KPROXY_ARCH:-$here}

# What a container runtime mounts over, since it can't make it in a read-only root.
mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/run/kproxy" "$root/tmp" "$root/var/run" "$root/var/lib/kproxy" \
	"$root/var/lib/kube-proxy" "$root/etc" "$root/usr/local/bin"
: >"$root/run/xtables.lock"
echo 'root:x:0:0:root:/:/usr/sbin/nologin' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf" # an API server may be named in the node's /etc/hosts only
ln -s kproxy "$root/usr/local/bin/kubectl-kproxy"             # for the dashboard of all nodes
[ "${2:-}" != nftables ] || exit 0

# iptables and ipset with their dependencies, without debconf, which only sets
# packages up, and libgcc, which only C++ and cancelled threads need. netbase has
# the names of protocols (/etc/protocols), which iptables prints.
packages="iptables ipset netbase libc6 libip4tc2 libip6tc2 libxtables12 libnftnl11
	libmnl0 libnfnetlink0 libnetfilter-conntrack3 libipset13"

debs=$(mktemp -d)
trap 'rm -rf "$debs"' EXIT
# shellcheck disable=SC2086 # a list of words
if [ "$arch" = "$here" ]; then
	(cd "$debs" && apt-get -q -o APT::Sandbox::User=root download $packages)
else # by lists of its own, so that this machine's packages stay as they are
	lists=$(mktemp -d)
	trap 'rm -rf "$debs" "$lists"' EXIT
	mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
	apt() {
		apt-get -q -o APT::Sandbox::User=root -o APT::Architecture="$arch" -o APT::Architectures="$arch" \
			-o Dir::State::lists="$lists/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$lists/cache" "$@"
	}
	apt update
	(cd "$debs" && apt download $packages)
fi

# What scanners of images look for: a file for each package, and which Debian it is.
mkdir -p "$root/var/lib/dpkg/status.d" "$root/etc"
cp /etc/os-release "$root/etc/"
for d in bin sbin lib lib64; do
	mkdir -p "$root/usr/$d"
	ln -s "usr/$d" "$root/$d"
done
for deb in "$debs"/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$root"
	dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package)"
done

# Without documentation, except licenses, and without character sets.
find "$root/usr/share/doc" ! -type d ! -name copyright -delete
rm -rf "$root"/usr/share/man "$root"/usr/share/lintian "$root"/usr/share/bug "$root"/usr/share/locale \
	"$root"/usr/lib/*/gconv "$root"/usr/lib/*/perl-base
find "$root/usr/share/doc" -type d -empty -delete

# The usual names, which are Debian's alternatives. kproxy finds out by itself in
# which variant the host's rules are; this one counts where there are none.
for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
	ln -sf xtables-nft-multi "$root/usr/sbin/$name"
done

# Whatever is missing shows here, and not on a node; another processor's programs may not run here.
if [ "$arch" != "$here" ]; then
	for program in xtables-nft-multi xtables-legacy-multi ipset; do test -s "$root/usr/sbin/$program"; done
	exit 0
fi
for program in iptables ip6tables iptables-nft ip6tables-nft iptables-legacy ip6tables-legacy iptables-nft-save \
	iptables-nft-restore iptables-legacy-save iptables-legacy-restore; do
	chroot "$root" "/usr/sbin/$program" --version
done
chroot "$root" /usr/sbin/ipset help >/dev/null # its version it asks the kernel for, which takes CAP_NET_ADMIN
