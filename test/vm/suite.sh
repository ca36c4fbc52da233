#!/usr/bin/env bash
# Runs compiled tests in a virtual machine, and prints their events (go doc
# test2json) as of packages that end in "(vm)", so that they aren't taken for
# those on this machine's kernel.
#
# Usage: test/vm/suite.sh FOLDER [ARGUMENT...] [-- FOLDER [ARGUMENT...]]...
#
# FOLDER is a package's, from the repository's root; its tests were compiled to
# bin/vm/FOLDER.test, with - for /. Arguments that look like NAME=VALUE are put
# into the environment, the others are the tests'.
set -euo pipefail
cd "$(dirname "$0")/../.."

# suite FOLDER [ARGUMENT...] runs one package's tests; inside the guest.
suite() {
	local folder=$1 variables=() arguments=() word
	local name="kproxy.dev/kproxy/$folder (vm)"
	for word in "${@:2}"; do
		case $word in
		-*) arguments+=("$word") ;;
		*=*) variables+=("$word") && name+=" $word" ;;
		esac
	done
	# That a test failed shows in its events.
	(cd "$folder" && env "${variables[@]}" "$OLDPWD/bin/vm/test2json" -t -p "$name" \
		"$OLDPWD/bin/vm/${folder//\//-}.test" -test.v=test2json -test.paniconexit0 -test.timeout 60m "${arguments[@]}") || true
}

if [[ ${1:-} != --inside ]]; then
	failed=
	KPROXY_VM_TIMEOUT=${KPROXY_VM_TIMEOUT:-3000} test/vm/run.sh "$0" --inside "$@" || failed=$?
	[[ -z $failed ]] || printf '{"Action":"fail","Package":"vm: %s"}\n' "$1"
	exit 0
fi
shift
words=()
for word in "$@" --; do
	if [[ $word == -- ]]; then
		suite "${words[@]}"
		words=()
	else
		words+=("$word")
	fi
done
