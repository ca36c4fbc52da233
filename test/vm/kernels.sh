#!/usr/bin/env bash
# Runs the demonstration and the end-to-end tests whose subject is a data plane, in every mode of the kernel's, on other kernels than
# this machine's, each of which is fetched as one of Debian's packages. It writes test2json events.
#
# Usage: test/vm/kernels.sh [PACKAGE...]
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/go/bin
packages=("$@")
((${#packages[@]})) || packages=(linux-image-amd64 linux-image-6.12-amd64)
bin=$PWD/bin/kernels
export KPROXY_BIN=$PWD/bin/kproxy
. test/e2e/planes.sh

rm -rf "$bin"
mkdir -p "$bin"
go build -buildvcs=false -o "$bin/test2json" cmd/test2json
CGO_ENABLED=0 go test -buildvcs=false -trimpath -ldflags='-s -w' -c -o "$bin/e2e.test" ./test/e2e

# A guest is a mode of the kernel's; userspace and auto, which have no rules of their own, are demonstrated in the one of nftables.
declare -A demos=([ipvs]=ipvs [iptables]=iptables [nftables]="nftables userspace auto")

# guest PACKAGE MODE runs all of a mode's in one boot.
guest() {
	local package=$1 mode=$2 name demo command=
	export KPROXY_VM_PACKAGE=$package KPROXY_VM_TIMEOUT=5400 KPROXY_E2E_MODE=$mode
	name="test/e2e ($package, $mode)"
	for demo in ${demos[$mode]}; do
		command+="bin/kproxy lab demo --mode $demo >/run/demo 2>&1 && action=pass || { action=fail; cat /run/demo >&2; }
			printf '{\"Action\":\"%s\",\"Package\":\"lab demo ($package, $demo)\",\"Test\":\"Demo\"}\n' \$action
		"
	done
	test/vm/run.sh bash -c "$command
		cd test/e2e && $(printf '%q ' ../vm/suite.sh "$bin/test2json" "$bin/e2e.test" "$name" -test.timeout=80m -test.run="^Test($planes|IPTables.*|NFTables.*|IPVS.*)\$" -test.skip="$same|^TestTakeover\$")" ||
		printf '{"Action":"fail","Package":"%s"}\n' "$name"
}
running=0
for package in "${packages[@]}"; do
	for mode in ipvs iptables nftables; do # the longest first
		((running < $(nproc))) || { wait -n; running=$((running - 1)); }
		guest "$package" "$mode" >"$bin/$package-$mode.json" &
		running=$((running + 1))
	done
done
wait
cat "$bin"/*.json
