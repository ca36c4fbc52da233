#!/usr/bin/env bash
# Builds the control plane of the tests (controlplane/) unless that was done before,
# and prints the folder that holds it: etcd, kube-apiserver, kube-controller-manager, kube-proxy
# and kubectl, by these names. Put it first in PATH to use them by hand.
#
# With the argument kube-proxy it builds that alone, as its project does: with the optimising
# compiler, as its speed is measured (test/bench).
#
# It is kept in $XDG_CACHE_HOME/kproxy-kube (~/.cache/kproxy-kube), by what it was built
# from. Building takes some minutes and 2 GB of Go's own cache; after that, nothing.
set -euo pipefail
cd "$(dirname "$0")/controlplane"
PATH=$PATH:/usr/local/go/bin
programs="etcd kube-apiserver kube-controller-manager kube-proxy kubectl"

# What compiles fast: no inlining, no debugging information. The tests wait for
# packets and not for this, and half of its CPU time is the compiler's.
gcflags='all=-l -dwarf=false'
package=.
if [[ ${1:-} == kube-proxy ]]; then
	programs=kube-proxy gcflags= package=k8s.io/kubernetes/cmd/kube-proxy
fi
version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
stamp=k8s.io/component-base/version
IFS=. read -r major minor _ <<<"${version#v}"
ldflags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"

key=$({ go env GOVERSION GOARCH; echo "$gcflags $ldflags $programs"; cat go.mod go.sum ./*.go; } | sha256sum | cut -c 1-16)
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
	CGO_ENABLED=0 GOFLAGS= GOWORK=off go build -buildvcs=false -trimpath -gcflags "$gcflags" -ldflags "$ldflags" -o "$new/programs" "$package"
	for program in $programs; do ln -s programs "$new/$program"; done
	chmod 755 "$new"
	find "$cache" -mindepth 1 -maxdepth 1 \( -name 'v*' -o -name 'objects-*' \) -mtime +30 -exec rm -rf {} + # that nothing uses any more
	mv "$new" "$folder"
fi
touch "$folder"
echo "$folder"
