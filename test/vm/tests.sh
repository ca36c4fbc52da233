#!/usr/bin/env bash
# Runs in the VM the tests that this machine's kernel can't run, and those that
# shall pass on a second kernel too. It writes test2json events; a package is
# named as it is, with '(vm)' or what else tells its run from others.
#
# Usage: test/vm/tests.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/go/bin
module=$(go list -m)
bin=$PWD/bin/vm

# Each list is one guest, and guests run side by side. A row is a package, what
# tells this run of it, and its environment and arguments.
ipvs=(
	"test/e2e      (vm,ipvs)     KPROXY_E2E_MODE=ipvs"
	"test/golden   (vm)"
)
iptables=(
	"kernel/ipvs   (vm)"
	"kernel/ipvs   (vm,bench)    -test.run=^\$ -test.bench=. -test.benchtime=1x"
	"kernel        (vm)"
	"test/e2e      (vm,iptables) KPROXY_E2E_MODE=iptables"
)

binary() { echo "$bin/${1//\//-}.test"; }

# build makes what the guests run: static, as dynamic linking costs most where it is emulated.
build() {
	local row package
	export CGO_ENABLED=0
	mkdir -p "$bin"
	go build -buildvcs=false -o "$bin/test2json" cmd/test2json
	for row in "${ipvs[@]}" "${iptables[@]}"; do
		package=${row%% *}
		[[ $(binary "$package") -nt $started ]] || go test -buildvcs=false -c -o "$(binary "$package")" "./$package"
	done
}

# script prints what a guest does for its rows. The events say what failed.
script() {
	local row package name rest vars
	for row; do
		read -r package name rest <<<"$row"
		vars=
		while [[ $rest =~ ^([A-Z][A-Z0-9_]*=[^ ]*)\ *(.*) ]]; do
			vars+="${BASH_REMATCH[1]} "
			rest=${BASH_REMATCH[2]}
		done
		read -ra rest <<<"$rest"
		printf '(cd %q && %s%q %q %q %q %s)\n' "$PWD/$package" "$vars" \
			"$PWD/test/vm/suite.sh" "$bin/test2json" "$(binary "$package")" "$module/$package $name" "${rest[*]@Q}"
	done
	echo true
}

# guest NAME ROW... writes events into the guest's own file, as lines of two writers would mix.
guest() {
	local name=$1
	shift
	KPROXY_VM_TIMEOUT=3600 test/vm/run.sh bash -c "$(script "$@")" >"$bin/$name.json" ||
		printf '{"Action":"fail","Package":"vm (%s)"}\n' "$name" >>"$bin/$name.json"
}

started=$(mktemp)
trap 'rm -f "$started"' EXIT
build
guest ipvs "${ipvs[@]}" &
guest iptables "${iptables[@]}" &
wait
cat "$bin/ipvs.json" "$bin/iptables.json"
