#!/usr/bin/env bash
# Builds what a cluster of nodes on one machine runs, unless that was done before, and prints
# the folder that holds it: bin/ has Kubernetes' programs (../kube/setup.sh builds them),
# containerd and its tools; images/ has archives for `ctr images import`; rootfs/ is the root
# file system of kproxy's image.
#
# Nothing is downloaded but Go modules and Debian packages: the images that upstream's tests
# name are made here, of the same programs, and imported under those names.
#
# It is kept in $XDG_CACHE_HOME/kproxy-conformance (~/.cache/kproxy-conformance), by what it
# was made from. As root, after test/setup.sh conformance.
set -euo pipefail
cd "$(dirname "$0")"
PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin
containerd=v2.2.9

controlplane=$(../kube/setup.sh)
node=$(../kube/setup.sh conformance)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-conformance
folder=$cache/$({ basename "$controlplane" "$node"; cat build.sh coredns/* ../../deploy/rootfs.sh; } | sha256sum | cut -c 1-16)
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # who comes second finds it built
if [[ -e $folder ]]; then
	touch "$folder"
	echo "$folder"
	exit
fi
echo "building containerd $containerd, CoreDNS and images, which takes minutes once" >&2
new=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
mkdir -p "$new/bin" "$new/images"
ln -s "$controlplane"/* "$node"/* "$new/bin/" 2>/dev/null || true # both have their file "programs", which nobody calls

build() { GOGC=off GOMEMLIMIT=1GiB CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOWORK=off GOBIN=$new/bin go "$1" -trimpath -gcflags 'all=-l -dwarf=false' -ldflags "-s -w ${ldflags:-}" "${@:2}"; }
for name in containerd containerd-shim-runc-v2 ctr; do
	ldflags="-X github.com/containerd/containerd/v2/version.Version=$containerd" build install "github.com/containerd/containerd/v2/cmd/$name@$containerd"
done
(cd coredns && build build -o "$new/bin/coredns" .)

# put FILE [ROOT-PATH] copies a program into a root file system, with the libraries it loads.
put() {
	local lib
	rm -f "$root${2:-$1}"
	install -D "$(realpath "$1")" "$root${2:-$1}"
	for lib in $(ldd "$1" 2>/dev/null | grep -o '/[^ ]*' | sort -u); do
		[[ -e $root$lib ]] || install -D "$(realpath "$lib")" "$root$lib"
	done
}

# archive FILE NAMES ENTRYPOINT [COMMAND] makes an archive of what is in $root: names with commas between them.
archive() {
	local file=$new/images/$1.tar names=$2 entry=$3 command=${4:-} layer config name tags=
	tar -C "$root" --owner=0 --group=0 -cf "$new/layer.tar" .
	layer=$(sha256sum "$new/layer.tar" | cut -d ' ' -f 1)
	printf '{"architecture":"%s","os":"linux","config":{"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],"Entrypoint":[%s],"Cmd":[%s]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
		"$(go env GOARCH)" "$entry" "$command" "$layer" >"$new/config.json"
	config=$(sha256sum "$new/config.json" | cut -d ' ' -f 1).json
	mv "$new/config.json" "$new/$config"
	for name in ${names//,/ }; do tags+=",\"$name\""; done
	printf '[{"Config":"%s","RepoTags":[%s],"Layers":["layer.tar"]}]' "$config" "${tags#,}" >"$new/manifest.json"
	tar -C "$new" -cf "$file" manifest.json "$config" layer.tar
	rm "$new/layer.tar" "$new/manifest.json" "$new/$config"
}

listed=$("$new/bin/e2e.test" --list-images 2>/dev/null)
upstream() { grep -E "/($1):" <<<"$listed" | sort -V | tail -n 1; }
kubernetes=$(go env GOMODCACHE)/k8s.io/kubernetes@$(basename "${controlplane%-*}")

# What upstream's tests call in their pods. jessie-dnsutils is the older name, until 1.35.
root=$new/tools
mkdir -p "$root"/{bin,sbin,usr/{bin,sbin,local/bin},etc,tmp,run,proc,sys,dev,root,uploads,var}
chmod 1777 "$root/tmp"
ln -s ../run "$root/var/run"
install "$(command -v busybox)" "$root/bin/busybox"
for name in $(busybox --list); do [[ $name == busybox ]] || ln -s busybox "$root/bin/$name"; done
put /bin/bash
put /bin/dash /bin/sh # that of busybox has an nc and a wget of its own: tests want OpenBSD's and GNU's
put /bin/dash /bin/ash
for name in curl wget dig host iperf conntrack ip ss nft nc.openbsd timeout seq getent; do
	rm -f "$root/bin/$name"
	put "$(command -v "$name")" "/usr/bin/${name%.openbsd}"
done
rm -f "$root/bin/nc"
ln -s ../../bin/iperf "$root/usr/local/bin/iperf"
ln -s ../bin/conntrack "$root/usr/sbin/conntrack"
for name in xtables-nft-multi xtables-legacy-multi; do put "/usr/sbin/$name"; done
for name in {,ip6}tables{,-save,-restore}; do ln -s xtables-nft-multi "$root/usr/sbin/ip${name#ip}"; done
mkdir -p "$root/usr/lib/$(uname -m)-linux-gnu"
cp -r "/usr/lib/$(uname -m)-linux-gnu/xtables" "$root/usr/lib/$(uname -m)-linux-gnu/"
echo 'tries = 1' >"$root/etc/wgetrc" # as busybox's
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
printf 'root:x:0:0:root:/:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"
cp /etc/protocols /etc/services "$root/etc/" 2>/dev/null || true
archive busybox "$(upstream e2e-test-images/busybox),$(upstream 'e2e-test-images/glibc-dns-testing|e2e-test-images/jessie-dnsutils'),$(upstream distroless-iptables)" '' '"sh"'

install "$new/bin/agnhost" "$root/agnhost"
ln -s agnhost "$root/agnhost-2"
cp "$kubernetes"/test/images/agnhost/porter/localhost.{crt,key} "$root/"
archive agnhost "localhost/agnhost:conformance,$(upstream e2e-test-images/agnhost)" '"/agnhost"' '"pause"'

root=$new/regression
mkdir "$root"
install "$(realpath "$new/bin/regression-issue-74839")" "$root/regression-issue-74839"
archive regression "$(upstream regression-issue-74839)" '"/regression-issue-74839"'

root=$new/pause
mkdir "$root"
gcc -Os -static -DVERSION=conformance -o "$root/pause" "$kubernetes/build/pause/linux/pause.c"
archive pause "localhost/pause:conformance,$(upstream pause)" '"/pause"'

root=$new/coredns
mkdir -p "$root/etc"
install "$new/bin/coredns" "$root/coredns"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
archive coredns localhost/coredns:conformance '"/coredns"'

../../deploy/rootfs.sh "$new/rootfs" >&2
root=$new/kube-proxy
cp -a "$new/rootfs" "$root"
install "$(realpath "$controlplane/kube-proxy")" "$root/usr/local/bin/kube-proxy"
archive kube-proxy localhost/kube-proxy:conformance '"/usr/local/bin/kube-proxy"'

rm -rf "$new"/{tools,regression,pause,coredns,kube-proxy}
chmod 755 "$new"
find "$cache" -mindepth 1 -maxdepth 1 -name '????????????????' -mtime +30 -exec rm -rf {} + # that nothing uses any more
mv "$new" "$folder"
echo "$folder"
