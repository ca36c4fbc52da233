#!/usr/bin/env bash
# Runs every check and test and ends with the line 'N passed, N failed, N
# skipped'. With KPROXY_CI or CI set, a skipped test is a failure.
#
# Everything writes test2json events (go doc test2json) into one pipe; the
# program in test/report counts them.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
export KPROXY_BIN=$PWD/bin/kproxy
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
ci=${KPROXY_CI:-${CI:-}}

# check NAME COMMAND... is a test that passes when the command does.
check() {
	local name=$1 action=pass
	shift
	"$@" >&2 || action=fail
	printf '{"Action":"%s","Package":"checks","Test":"%s"}\n' "$action" "$name"
}

# tests NAME ARGUMENTS... runs go test. That it failed shows in its events, except when
# it couldn't even start.
tests() {
	local name=$1
	shift
	go test -json -timeout 15m "$@" ||
		printf '{"Action":"fail","Package":"go test (%s)"}\n' "$name"
}

# in_vm runs on another kernel, Debian's, what needs IPVS and what shall pass on both.
in_vm() {
	if [[ $(uname -m) == x86_64 ]]; then
		test/vm/tests.sh || printf '{"Action":"fail","Package":"test/vm/tests.sh"}\n'
	else
		printf '{"Action":"%s","Package":"vm","Test":"all","Output":"the VM needs an x86-64 machine\\n"}\n' output skip
	fi
}

# with_kubernetes runs what needs a real API server. It is a module of its own, so that
# the product's go.mod stays clean; what both require is as in the product's (-mod=mod).
# Not vetted is controlplane/, one page, for which vet would read all of Kubernetes.
with_kubernetes() (
	cd test/kube
	export GOFLAGS="$GOFLAGS -mod=mod"
	check vet-kube go vet ./...
	check staticcheck-kube go run "$staticcheck" ./...
	if ((EUID == 0)); then
		check controlplane ./setup.sh # waits for the one that was started first
	fi
	tests kubernetes -count=1 ./...
)

# with_browser looks at the dashboard with a real browser. A module of its own as well.
# What it saw is in bin/artifacts afterwards.
with_browser() (
	cd test/browser
	export GOFLAGS="$GOFLAGS -mod=mod" KPROXY_ARTIFACTS=${KPROXY_ARTIFACTS:-$PWD/../../bin/artifacts}
	check vet-browser go vet ./...
	check staticcheck-browser go run "$staticcheck" ./...
	tests browser -count=1 ./...
)

# dashboard tests what the pages compute, without a browser.
dashboard() { node --test web/ui_test/*.test.js; }

# bench_works runs each work of `make bench` once, and fails when one of them
# carried nothing or failed.
bench_works() {
	if ((EUID == 0)); then
		check bench test/bench/bench.sh quick
	else
		printf '{"Action":"%s","Package":"bench","Test":"quick","Output":"it makes network namespaces, which needs root\\n"}\n' output skip
	fi
}

formatted() {
	local wrong
	wrong=$(gofmt -l $(git ls-files --cached --others --exclude-standard '*.go'))
	[[ -z $wrong ]] || { echo "not formatted, run gofmt -w on: $wrong"; return 1; }
}

# Tests never rewrite goldens, so in CI they are as they were committed.
goldens_clean() { [[ -z $ci ]] || git diff --exit-code --stat -- test/golden; }

everything() {
	local unit
	check gofmt formatted
	check vet go vet ./...
	check staticcheck go run "$staticcheck" ./...
	unit=$(go list ./... | grep -v '/test/e2e$')
	tests unit -race $unit
	check goldens goldens_clean
	check dashboard dashboard
	[[ ! -d test/e2e ]] || tests end-to-end -count=1 ./test/e2e/...
	with_browser
	with_kubernetes
	in_vm
	bench_works
	# Go's benchmarks run once, so that they keep working; `make bench-go` measures. Those of
	# kernel/ipvs have run in the VM.
	tests benchmarks -run '^$' -bench . -benchtime 1x -p 1 $(grep -v '/kernel/ipvs$' <<<"$unit")
}

mkdir -p bin
go build -o bin/report ./test/report
# What takes minutes where it isn't kept from before is built in the time that tests wait;
# each with all it starts is a process group, which ends with this script.
early=()
if ((EUID == 0)); then
	setsid chrt --idle 0 test/kube/setup.sh >/dev/null 2>&1 &
	early+=("-$!")
fi
if [[ $(uname -m) == x86_64 ]]; then
	setsid test/vm/prepare.sh >/dev/null 2>&1 &
	early+=("-$!")
fi
trap 'kill -- "${early[@]}" 2>/dev/null || true' EXIT
everything | bin/report ${ci:+-fail-skipped}
