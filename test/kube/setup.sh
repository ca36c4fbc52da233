#!/usr/bin/env bash
# Builds the control plane of the tests (controlplane/) unless that was done before,
# and prints the folder that holds it: etcd, kube-apiserver, kube-controller-manager, kube-proxy
# and kubectl, by these names. Put it first in PATH to use them by hand.
#
# With the argument kube-proxy it builds that alone, as its project does: with the optimising
# compiler, as its speed is measured (test/bench). With conformance it builds what a cluster
# of nodes needs besides (test/conformance): kubelet, kube-scheduler, upstream's end-to-end tests
# of the network with ginkgo, which runs them, and agnhost and another, which their pods run.
#
# KUBERNETES=MINOR builds another version than controlplane/go.mod names, from what that version's own go.mod
# requires: one of those in others, below.
#
# It is kept in $XDG_CACHE_HOME/kproxy-kube (~/.cache/kproxy-kube), by what it was built
# from. Building takes some minutes and 2 GB of Go's own cache; after that, nothing.
set -euo pipefail
cd "$(dirname "$0")/controlplane"
PATH=$PATH:/usr/local/go/bin
others="v1.35.4 v1.37.2" # tried: the oldest minor version that upstream supports, and the newest
programs="etcd kube-apiserver kube-controller-manager kube-proxy kubectl"

# What compiles fast: no inlining, no debugging information. The tests wait for
# packets and not for this, and half of its CPU time is the compiler's.
gcflags='all=-l -dwarf=false'
package=.
more=()
case ${1:-} in
kube-proxy) programs=kube-proxy gcflags= package=k8s.io/kubernetes/cmd/kube-proxy ;;
conformance)
	programs="kubelet kube-scheduler" package=./node
	more=(github.com/onsi/ginkgo/v2/ginkgo k8s.io/kubernetes/test/images/{agnhost,regression-issue-74839})
	;;
esac
pinned=$(sed -n 's|^\s*k8s.io/kubernetes ||p' go.mod)
wanted=${KUBERNETES:+v$KUBERNETES}
for version in $pinned $others ''; do
	[[ ${version%.*} != "${wanted:-${pinned%.*}}" ]] || break
done
if [[ -z $version ]]; then
	minors=$(printf '%s\n' "$pinned" $others | sed -E 's/v(.*)\..*/\1/' | sort -V | paste -sd ,)
	echo "KUBERNETES: no minor version \"$KUBERNETES\" is built here; there are ${minors//,/, }" >&2
	exit 2
fi
stamp=k8s.io/component-base/version
IFS=. read -r major minor _ <<<"${version#v}"
ldflags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"

key=$({ go env GOVERSION GOARCH; echo "$gcflags $ldflags $programs"; cat go.mod go.sum ./*.go; ((${#more[@]} == 0)) || { echo "${more[@]}"; cat node/*.go e2e/*.go; }; } | sha256sum | cut -c 1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kproxy-kube
folder=$cache/$version-$key

if [[ ! -e $folder ]]; then
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock 9 # who comes second finds it built
fi
if [[ ! -e $folder ]]; then
	echo "building $programs of Kubernetes $version, which takes minutes once" >&2
	new=$(mktemp -d "$cache/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOWORK=off
	export GOGC=off GOMEMLIMIT=1GiB # of the compiler, which spends a fifth of its time on collecting garbage
	if [[ $version != "$pinned" ]]; then # upstream's go.mod, whose staging modules are published as v0
		source=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
		cp -r . "$new/source"
		cd "$new/source"
		sed -E "s|(k8s\.io/[a-z-]+) => \./staging/.*|\1 => \1 v0.${version#v1.}|" "$source/go.mod" >go.mod
		cat "$source/go.sum" >go.sum
		go mod edit -module kproxy.dev/kproxy/test/kube/controlplane -require "k8s.io/kubernetes@$version"
		[[ ! -e $source/test/utils/ktesting/format ]] || sed -i 's|/test/utils/format"|/test/utils/ktesting/format"|' e2e/*.go # since 1.37
		GOFLAGS+=" -mod=mod"
	fi
	go build -trimpath -gcflags "$gcflags" -ldflags "$ldflags" -o "$new/programs" "$package"
	for program in "${more[@]}"; do
		go build -trimpath -gcflags "$gcflags" -ldflags "$ldflags" -o "$new/" "$program"
	done
	((${#more[@]} == 0)) || go test -c -vet=off -trimpath -gcflags "$gcflags" -ldflags "$ldflags" -o "$new/e2e.test" ./e2e
	rm -rf "$new/source"
	for program in $programs; do ln -s programs "$new/$program"; done
	chmod 755 "$new"
	find "$cache" -mindepth 1 -maxdepth 1 \( -name 'v*' -o -name 'objects-*' \) -mtime +30 -exec rm -rf {} + # that nothing uses any more
	mv "$new" "$folder"
fi
touch "$folder"
echo "$folder"
