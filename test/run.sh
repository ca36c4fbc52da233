#!/usr/bin/env bash
# Runs every check and test and ends with what each stage took, what failed and why, and
# the line 'N passed, N failed, N skipped'. With KPROXY_CI or CI set, a skipped test is a
# failure.
#
# Usage: test/run.sh [check]
#   check   only what takes less than a minute: the checks and unit tests of packages that differ from main and of
#           some that import them
#
# Everything writes test2json events (go doc test2json) into one pipe; the
# program in test/report counts them.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
export GOFLAGS="${GOFLAGS:-} -buildvcs=false -trimpath" # as `make build`
export CGO_ENABLED=0 # as there and in the VM, so that all is compiled once; only -race needs cgo
root=$PWD
export KPROXY_BIN=$root/bin/kproxy
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
linter=$root/bin/${staticcheck##*/}-$(go env GOVERSION)
ci=${KPROXY_CI:-${CI:-}}

# check NAME COMMAND... is a test that passes when the command does. It runs in this shell, and may set variables.
check() {
	local name=$1 verdict=PASS output
	output=$(mktemp)
	shift
	"$@" >"$output" 2>&1 || verdict=FAIL
	{ echo "=== RUN   $name"; cat "$output"; printf -- '--- %s: %s (0.00s)\n%s\n' $verdict "$name" $verdict; } | go tool test2json -p checks | grep '"Test":'
	rm "$output"
}

# tests NAME ARGUMENTS... runs go test. That it failed shows in its events, except when
# it couldn't even start. Vet runs by itself, once for all packages.
tests() {
	local name=$1
	shift
	go test -json -vet=off -timeout=15m "$@" | labelled || printf '{"Action":"fail","Package":"go test (%s)"}\n' "$name"
}

# compile ARGUMENTS... compiles packages and their tests, ahead of what needs them: the toolchain spends a fifth of its time on
# collecting garbage, and those it starts inherit what they are told of that.
compile() { GOGC=off GOMEMLIMIT=1GiB go list -export -deps -test "$@" >/dev/null || true; } # who needs it says what is wrong

# labelled adds $label to the names of packages, for a run that isn't their first.
labelled() { sed "s|\"Package\":\"[^\"]*|&${label:-}|"; }

# guests GUEST... run on another kernel what needs IPVS and what shall pass on both. Their clock stands still while they have no
# processor, so they do with the time that others leave.
guests() {
	if [[ $(uname -m) == x86_64 ]]; then
		test/vm/tests.sh "$@" || printf '{"Action":"fail","Package":"test/vm/tests.sh %s"}\n' "$*"
	else
		printf '{"Action":"%s","Package":"vm","Test":"%s","Output":"the VM needs an x86-64 machine\\n"}\n' output "$*" skip "$*"
	fi
}

# vm_itself tests what starts guests; then, in a guest that waits as long as there is to wait, what measures time; and an image that
# unit_sequential has made.
vm_itself() {
	not_idle
	[[ $(uname -m) != x86_64 ]] || tests vm-itself -count=1 -parallel=$((3 * $(nproc))) ./test/vm # they mostly wait
	guests clock image
}

# end_to_end runs the tests with real packets whole in one mode, and in_iptables those whose subject is a data plane in another
# one, with which mode userspace goes.
end_to_end() { KPROXY_E2E_MODE=nftables tests end-to-end -count=1 -timeout=30m -skip="$elsewhere" ./test/e2e; }

in_iptables() {
	local planes same
	. test/e2e/planes.sh
	label=" (iptables)" KPROXY_E2E_MODE=iptables tests iptables -count=1 -timeout=30m -run="^Test($planes|IPTables.*|TakeoverBetweenReleases)\$" -skip="$same|$elsewhere" ./test/e2e
}

# in_chaos runs takeovers, kills, stops and flushes at random, beside others, as clients wait for most of their time. `make soak`
# does that for an hour.
in_chaos() {
	not_idle
	local mode
	for mode in iptables nftables; do # with iptables runs mode userspace
		label=" (chaos, $mode)" KPROXY_E2E_MODE=$mode KPROXY_CHAOS=40s tests "chaos-$mode" -count=1 -run='^TestChaos$' ./test/e2e
	done
}

# not_idle is for a stage that runs beside others, and whose tests have deadlines: where the processors are short, it gets
# its share of them. An ordinary user can't take that back.
not_idle() { chrt --other -p 0 $BASHPID || ((EUID != 0)); }

# with_kubernetes runs what needs a real API server. It is a module of its own, so that
# the product's go.mod stays clean; what both require is as in the product's (-mod=mod).
# Not vetted is controlplane/, one page, for which vet would read all of Kubernetes.
with_kubernetes() (
	cd test/kube
	export GOFLAGS="$GOFLAGS -mod=mod"
	if ((EUID == 0)); then
		check controlplane ./setup.sh # waits for the one that was started first
	fi
	compile ./...
	tests kubernetes -count=1 ./...
)

# with_cluster runs a dozen of upstream's own network tests in a cluster of nodes on this machine, in one mode, which
# the commit's hash chooses: it is the same in a shallow clone.
with_cluster() {
	not_idle
	local modes=(nftables iptables userspace auto) mode programs
	mode=$(git rev-parse --verify -q HEAD || echo 0)
	mode=${modes[0x${mode:0:8} % ${#modes[@]}]}
	if ((EUID != 0)); then
		printf '{"Action":"%s","Package":"test/conformance","Test":"quick","Output":"it makes a cluster of namespaces, which needs root\\n"}\n' output skip
		return
	fi
	echo "upstream's network tests, in mode $mode" >&2
	check conformance-programs eval 'programs=$(test/conformance/build.sh)' # waits for what was started first
	go build -o bin/conformance/ ./test/conformance && bin/conformance/conformance -programs "$programs" -modes "$mode" -quick -events ||
		printf '{"Action":"fail","Package":"test/conformance (%s)"}\n' "$mode"
}

# with_browser looks at the dashboard with a real browser. A module of its own as well.
# What it saw is in bin/artifacts afterwards.
with_browser() (
	cd test/browser
	export GOFLAGS="$GOFLAGS -mod=mod" KPROXY_ARTIFACTS=${KPROXY_ARTIFACTS:-$PWD/../../bin/artifacts}
	tests browser -count=1 ./...
)

# with_helm compares the chart with the kustomizations, by the libraries of both.
with_helm() (
	cd test/helm
	export GOFLAGS="$GOFLAGS -mod=mod"
	tests helm -count=1 ./...
)

# dashboard tests what the pages compute, without a browser.
dashboard() { node --test web/ui_test/*.test.js; }

# bench_works runs each work of `make bench` once, and fails when one of them
# carried nothing or failed. Other settings of a peer that runs are left to `make bench QUICK=1`.
bench_works() {
	not_idle
	if ((EUID == 0)); then
		check bench test/bench/bench.sh quick \
			-subjects direct,offloaded,haproxy,nginx,io.Copy,engine,kproxy,kproxy-nftables,no-proxy,kproxy-nft,kube-proxy-nftables,haproxy-check,kproxy-userspace
	else
		printf '{"Action":"%s","Package":"bench","Test":"quick","Output":"it makes network namespaces, which needs root\\n"}\n' output skip
	fi
}

# lint runs staticcheck.
lint() { linter && GOGC=off GOMEMLIMIT=3GiB "$linter/staticcheck" "$@"; }

# linter builds staticcheck, once: go run asks the module proxy each time, which a stage that runs beside others may do in vain.
linter() { (flock 9; [[ -x $linter/staticcheck ]] || GOBIN=$linter twice go install "$staticcheck") 9>"$root/bin/lint.lock"; }

twice() { "$@" || "$@"; }

formatted() {
	local wrong
	wrong=$(gofmt -l $(git ls-files --cached --others --exclude-standard '*.go'))
	[[ -z $wrong ]] || { echo "not formatted, run gofmt -w on: $wrong"; return 1; }
}

# Tests never rewrite goldens, so in CI they are as they were committed.
goldens_clean() { [[ -z $ci ]] || git diff --exit-code --stat -- test/golden; }

# stage NAME COMMAND... runs a part of it all, and notes what it took, and how much of the machine's processors all that ran
# meanwhile took: what is less than all was waiting.
stage() {
	local name=$1 start=$SECONDS busy=$(jiffies)
	shift
	"$@"
	busy=$(($(jiffies) - busy))
	echo "after $SECONDS s: $name took $((SECONDS - start)) s" >&2 # for who watches, or a run that is cut short
	printf '{"Action":"stage","Package":"%s","Elapsed":%d,"Busy":%d}\n' "$name" $((SECONDS - start)) \
		$((SECONDS > start ? busy / (SECONDS - start) / $(nproc) : 0))
}

# jiffies prints the time in which processors worked since the machine's start, in hundredths of a second (proc(5)).
jiffies() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; }

# beside NAME COMMAND... runs a stage in the background, with the time that others leave of
# the processors: tests with real packets wait for much of theirs. together waits for such
# stages and passes their events on.
beside() {
	local name=$1
	shift
	set -m # a process group, which ends with this script
	(
		set +m
		chrt --idle -p 0 $BASHPID
		stage "$name (beside others)" "$@"
	) >"bin/stage-$name.json" &
	set +m
	background+=("$name=$!")
}
background=()

together() {
	local b
	for b in "${background[@]}"; do
		wait "${b#*=}" || printf '{"Action":"fail","Package":"stage %s"}\n' "${b%=*}"
		cat "bin/stage-${b%=*}.json"
	done
	background=()
}

# slow matches the packages whose tests take longest.
slow='/(conntrack|kernel/iptables|kernel/ipvs|kernel/nftables|userspace|cmd/kproxy|plan|test/deploy|trace|trace/netfilter)$'

# concurrent finds the packages that start goroutines, in their code or in their tests: in the others the race detector takes several
# times as long, and has nothing to find. Of kernel/nftables two tests do so, of kernel/ipvs one that needs IPVS. Those that import
# Kubernetes' API are raced for a release (`make race`): to compile all of that once more takes longer than all that are raced here.
concurrent() {
	git grep --untracked -lE '(^|[^a-z."])go (func|[A-Za-z_.]+\()|\.Go\(' -- '*.go' | xargs -n 1 dirname | sort -u |
		sed "s|^|$(go list -m)/|" | grep -xF "$packages" | grep -vE '/kernel/(ipvs|nftables)$' | grep -vxF "$clients"
}
raced_nftables='^Test(HeartbeatWhileElementsAreRead|PacketsBetweenTransactions)$'

# unit runs the packages that take longest first, so that none of them ends alone, and one
# package more at a time than there are processors, as some wait.
unit() {
	CGO_ENABLED=1 compile -race $raced
	CGO_ENABLED=1 tests unit -race -p=$(($(nproc) + 1)) $(grep -E "$slow" <<<"$raced") $(grep -vE "$slow" <<<"$raced")
	label=" (race)" CGO_ENABLED=1 tests unit-nftables -race -run="$raced_nftables" ./kernel/nftables
}

unit_sequential() {
	not_idle
	local rest
	rest=$(grep -vxF "$raced" <<<"$packages")
	tests unit-sequential -p="$(nproc)" -parallel=$((2 * $(nproc))) $(grep -E "$slow" <<<"$rest") $(grep -vE "$slow" <<<"$rest")
}

code() {
	check gofmt formatted
	compile ./...
	check vet go vet ./...
	check goldens goldens_clean
	check dashboard dashboard
}

# may_end_late runs what takes long, one after another, as each by itself keeps all processors busy. Tests that are modules of their own
# have `make check` look at them, and compiling for arm64 is for `make test-arm64`.
may_end_late() {
	stage staticcheck check staticcheck lint ./...
	stage benchmarks benchmarks
	stage helm with_helm
}

# other_modules vet|staticcheck MODULE... checks tests that are modules of their own.
other_modules() {
	local module
	for module in "${@:2}"; do
		(
			cd "test/$module"
			export GOFLAGS="$GOFLAGS -mod=mod"
			case $1 in
				vet) check "vet-$module" go vet $(go list ./... | grep -v /controlplane) ;;
				staticcheck) check "staticcheck-$module" lint ./... ;;
			esac
		)
	done
}

# benchmarks run once, so that they keep working, and those that program a kernel with fewer services; `make bench-go`
# measures. Those of kernel/ipvs run in the VM.
benchmarks() {
	not_idle
	local folders
	folders=$(git grep -l '^func Benchmark' -- ':!test/kube' ':!kernel/ipvs' | xargs -n 1 dirname | sort -u)
	tests benchmarks -run='^$' -bench=. -benchtime=1x -short -p=1 $(sed 's|^|./|' <<<"$folders")
}

everything() {
	local b
	trap 'for b in "${background[@]}"; do kill -- "-${b#*=}" || true; done' EXIT
	stage code code
	beside unit-sequential unit_sequential
	beside guests guests 2 1 3 4 nftables
	stage unit unit
	beside late may_end_late
	beside chaos in_chaos
	stage end-to-end end_to_end
	beside bench bench_works
	stage "mode iptables" in_iptables
	beside conformance with_cluster
	stage browser with_browser
	tail --pid="${background[0]#*=}" -f /dev/null # which makes the image that a guest serves with
	beside vm vm_itself
	stage kubernetes with_kubernetes
	stage "the rest of these" together
}

# changed finds the packages that differ from main, with other modules' folders of test/ among them, and those that
# import such a package: what a change of it can break. A file is of the nearest folder above it with Go files.
changed() {
	local base files folders all name folder imports
	base=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || echo HEAD)
	files=$({ git diff --name-only --relative "$base"; git ls-files --others --exclude-standard; } | sort -u)
	folders=$(xargs -r -n 1 dirname <<<"$files" | sort -u | while read -r folder; do
		until [[ $folder == . ]] || compgen -G "$folder/*.go" >/dev/null; do folder=$(dirname "$folder"); done
		echo "$folder"
	done | sort -u)
	all=$(go list -f '{{.ImportPath}} {{.Dir}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}} ' ./...)
	while read -r name folder imports; do
		! grep -qxE "go\.mod|go\.sum" <<<"$files" && ! grep -qxF "${folder#"$PWD/"}" <<<"$folders" || own+=("$name")
	done <<<"$all"
	for name in "${own[@]}"; do
		mapfile -t -O ${#users[@]} users < <(grep -F " $name " <<<"$all" | cut -d ' ' -f 1)
	done
	mapfile -t users < <(printf '%s\n' "${users[@]}" | sort -u | grep -vxF -e '' "${own[@]/#/-e}")
	! grep -q "^web/ui" <<<"$files" || pages=changed
	mapfile -t modules < <(sed -nE 's|^test/(kube\|browser\|helm)/.*|\1|p' <<<"$files" | sort -u)
}
own=() users=() modules=() pages=

# long matches tests that take ten seconds and more, or wait for several, and whose packages have shorter ones beside them.
long='^Test(ConformanceOfKernel|WatchNoticesAndRepairHelps|WatchFollowsOwnChanges|UnservedAreRefused|RendererFollows'
long+='|Bridges|BridgesThatShow|BridgedConnection|Ebtables|OtherWays|NextHopIsAnotherPod|UsedUpTTL|(Memory|UDPFlood|Greed)BesideAHundred|(End|Reset)BehindBackPressure|Restart|Bulk|DescriptorLimit|Soak.*|HandoverOfThousands)$'

# quick checks what changed and what imports it. Tests that take long don't run, and of what only imports a change,
# eight packages at most.
quick() {
	local tested=()
	changed
	echo "checks ${own[*]:-no package} ${modules[*]}, and ${#users[@]} packages that import it" >&2
	check gofmt formatted
	[[ -z $pages ]] || check dashboard dashboard
	mapfile -t tested < <({ printf '%s\n' "${own[@]}"; printf '%s\n' "${users[@]}" | grep -vE "$slow" | head -n 8; } | grep -vE '^$|/test/(e2e|deploy|vm)$')
	if ((${#own[@]})); then
		compile "${own[@]}" "${tested[@]}"
		check vet go vet "${own[@]}" "${users[@]}"
		check staticcheck lint "${own[@]}" >bin/staticcheck.json &
	fi
	tests layout -parallel=$((2 * $(nproc))) -skip="$long" ./test ./test/golden ./test/mutants "${tested[@]}"
	wait
	((${#own[@]} == 0)) || cat bin/staticcheck.json
	other_modules vet "${modules[@]}"
	other_modules staticcheck "${modules[@]}"
}

mkdir -p bin
go build -o bin/report ./test/report
if [[ ${1:-} == check ]]; then
	quick | bin/report
	exit
fi
packages=$(go list ./... | grep -vE '/test/(e2e|vm)$') # which have stages of their own
clients=$(go list -f '{{.ImportPath}} {{join .Deps " "}}' ./... | grep -F ' k8s.io/api/core/v1 ' | cut -d ' ' -f 1)
raced=$(concurrent)
elsewhere='^TestChaos$' # of the end-to-end tests
if ! test/last.sh >/dev/null; then
	elsewhere+='|^TestTakeoverBetweenReleases$'
	echo "TestTakeoverBetweenReleases doesn't run: this clone lacks the last release's commit (git fetch --unshallow --tags)" >&2
fi
echo "every check and test: 25 minutes on two processors, 40 the first time" >&2
# What takes minutes where it isn't kept from before is built in the time that tests wait;
# each with all it starts is a process group, which ends with this script. It isn't a session of its own: the kernel shares
# processors out among sessions first, whatever they run (sched_autogroup(7)).
early=()
set -m
if ((EUID == 0)); then
	nice -n 19 test/conformance/build.sh >/dev/null 2>&1 & # test/kube/setup.sh is its first step; it fetches modules, so isn't idle
	early+=("-$!")
fi
if [[ $(uname -m) == x86_64 ]]; then
	nice -n 19 test/vm/prepare.sh >/dev/null 2>&1 &
	early+=("-$!")
fi
# What stages that run beside others need from the network is fetched before, with a share of the processors: with none, a
# handshake takes longer than Go waits for it.
fetch() {
	local module
	for module in helm browser kube; do
		(cd "test/$module" && GOFLAGS="$GOFLAGS -mod=mod" twice go list -deps -test ./...)
	done
	linter
}
fetch >/dev/null 2>&1 &
early+=("-$!")
set +m
trap 'kill -- "${early[@]}" 2>/dev/null || true' EXIT
everything | bin/report ${ci:+-fail-skipped}
