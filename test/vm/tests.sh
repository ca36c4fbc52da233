#!/usr/bin/env bash
# Runs in the VM the tests that this machine's kernel can't run, and those that
# shall pass on a second kernel too. It writes test2json events; a package is
# named as it is, with '(vm)' or what else tells its run from others.
#
# Usage: test/vm/tests.sh [GUEST...]
#   GUEST   only these of the guests below
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/go/bin
module=$(go list -m)
bin=$PWD/bin/vm/${1:-all}

# A row is its guest, a package, what tells this run of it, and its environment and
# arguments. A guest's rows run one after another in one boot, and guests start in this order, or that of GUEST...: the longest first. The arguments #1/2
# and #2/2 share out the tests of mode ipvs. Of mode iptables those run that one kernel's
# tables, sets and connection tracking could do otherwise than another's, unless mode nftables shows it on this kernel.
. test/e2e/planes.sh
ipvs="^Test($planes|IPVS.*|AutoTakesWhatThereIs)\$"
tables="OffloadByItself|DamageIsRepaired|IPTablesLegacyVariant|InvalidPackets|UDPFlowsFollowChanges|IPTablesAffinityEnds"
# Of patterns that begin alike the first counts, so the shorter ones come first.
# Takeovers carry more streams than a guest does.
skip="^TestTakeover\$"
# What measures processors' time, and what sends as fast as it can until a time is up, wants a clock that goes on meanwhile.
clock="Compare|ForgottenConnectionsGoOn|IPVSDeletedServiceDrains"
skip+="|^Test($clock)\$"
# What goes by userspace only.
skip+="|^TestServiceIsEdited\$/^userspace\$|^TestUDPFlowsFollowChanges\$/^userspace\$|^TestTraceNamesFaults\$/^userspace\$|^TestAnotherProxy\$/userspace\$"
# Single parts of the way to userspace that are mended, which modes share; the whole of it, and what leads to IPVS, stay.
skip+="|^TestDamageIsRepaired\$/./^(the_first_chain|the_jumps|mangle|entries_are|the_endpoints|the_heartbeat|the_routing)"
# Ways of telling pods from others, by rules that all modes share, and sums of two configurations that stay.
skip+="|^TestFlows\$/^ipvs\$/^(by-.*|on-bridge|detector-and-all)\$|^TestTraceFlows\$/^ipvs\$/^plain\$|$same"
# What stops a packet by nftables is the same in every mode.
skip+="|^TestTraceNamesFaults\$/./^(a_dormant_table|a_nat_chain_that_was|firewalld|generous_limits|the_endpoint.s_nftables|the_length|what_has_the_service.s_address_is_dropped)"
# What IPVS does in mode auto is what it does in mode ipvs, but where a service moves between it and iptables, as in walks.
auto="^TestConformanceOfKernel\$/^auto\$/^(apply|clean-up|foreign|a_foreign)"
# What a model shows is the same on every kernel.
models="^Test(ConformanceOfModel|RendererRemembers)\$"
# In mode nftables with flowtables, which this machine may lack; the modules of iptables and ipset are kept out, with the programs.
without='rm -f /usr/sbin/{iptables,ip6tables,xtables,ipset}*'
without+=' && printf "install %s /bin/false\n" {ip,ip6,x}_tables ip_set nft_compat >/etc/modprobe.d/without.conf && '
# What kproxy does where the kernel can't log packets is shown there, too.
nolog='printf "install %s /bin/false\n" nft_log nfnetlink_log >/etc/modprobe.d/nolog.conf && '
log='rm -f /etc/modprobe.d/nolog.conf && '
rows=(
	"2        test/e2e      (vm,ipvs,2)     KPROXY_E2E_MODE=ipvs -test.skip=$skip #2/2"
	"1        test/e2e      (vm,ipvs,1)     KPROXY_E2E_MODE=ipvs -test.skip=$skip #1/2"
	"3        test/e2e      (vm,iptables)   KPROXY_E2E_MODE=iptables -test.run=^Test($tables)\$"
	"3        test/e2e      (vm,flows)      KPROXY_E2E_MODE=iptables -test.run=^TestFlows\$/^iptables\$/^plain\$"
	"3        test/golden   (vm)            -test.run=^TestKernel\$"
	"nftables test/e2e      (vm,nftables,nolog) KPROXY_E2E_MODE=nftables KPROXY_E2E_LOG=none -test.run=^Test(Flows|RestartIsHitless|KernelWithoutLog)\$/^(nftables)?\$/^(plain)?\$"
	"nftables kernel/nftables (vm,nftables) -test.run=^Test(Packets|SourceHash|Flowtable)\$"
	"4        kernel/ipvs   (vm)            -test.skip=$models|$auto"
	"4        kernel/ipvs   (vm,bench)      -test.run=^\$ -test.bench=. -test.benchtime=1x"
	"4        kernel        (vm)            -test.skip=^TestSentIsFiltered\$"
	"4        test/docs     (vm)            -test.run=^TestIPVSPage\$"
	"4        kernel/leftovers (vm)         -test.run=^TestLeftoverServers\$"
	"4        conntrack     (vm)            -test.run=^TestDeleteUnanswered\$" # which that kernel refuses
	"4        trace         (vm)            -test.run=^Test(TrafficControlIsNamed|BridgesByExpression)\$"
	"clock    test/e2e      (vm,ipvs,clock) KPROXY_E2E_MODE=ipvs -test.run=^Test($clock)\$"
	"clock    test/e2e      (vm,iptables,clock) KPROXY_E2E_MODE=iptables -test.run=^TestForgottenConnectionsGoOn\$"
	"image    test/deploy   (vm)            -test.run=^TestServe\$/^nft,_firewall_true\$" # with the image that test/deploy made here
)
# Where user-mode Linux doesn't boot, guests are what accel.sh says, many times slower.
[[ -n ${KPROXY_VM_ACCEL:-} ]] || ! KPROXY_VM_ACCEL=uml KPROXY_VM_TIMEOUT=600 test/vm/run.sh true >&2 || export KPROXY_VM_ACCEL=uml

binary() { echo "$bin/${1//\//-}.test"; }

# build PACKAGE makes what its guests run, unless it was made for others: static, as dynamic linking costs most in a guest,
# and without what debuggers read.
build() {
	[[ -n ${built[$1]:-} ]] || nice go test -buildvcs=false -ldflags='-s -w' -c -o "$(binary "$1")" "./$1" || return
	built[$1]=yes
}
declare -A built

# share PACKAGE I/N prints the argument that runs every Nth test of mode ipvs from the Ith on.
share() {
	local names
	names=$(KPROXY_E2E_MODE=ipvs "$(binary "$1")" -test.list "$ipvs" | grep '^Test' | awk -v i="${2%/*}" -v n="${2#*/}" 'NR % n == i % n' | paste -sd'|')
	echo "-test.run=^($names)\$"
}

# row_command ROW prints what its guest does for it. The events say what failed.
row_command() {
	local guest package name rest vars=
	read -r guest package name rest <<<"$1"
	while [[ $rest =~ ^([A-Z][A-Z0-9_]*=[^ ]*)\ *(.*) ]]; do
		vars+="${BASH_REMATCH[1]} "
		rest=${BASH_REMATCH[2]}
	done
	[[ $rest != *'#'* ]] || rest="${rest%#*}$(share "$package" "${rest#*#}")"
	read -ra rest <<<"$rest"
	[[ $name != *nftables* ]] || printf '%s' "$without"
	if [[ $name == *nolog* ]]; then printf '%s' "$nolog"; else printf '%s' "$log"; fi
	printf 'cd %q && %s%q %q %q %q %s\n' "$PWD/$package" "$vars" \
		"$PWD/test/vm/suite.sh" "$bin/test2json" "$(binary "$package")" "$module/$package $name" "${rest[*]@Q}"
}

# events passes events on, all of one writer's at once, as lines of two would mix.
events() { (flock 9 && cat) 9>"$bin/lock"; }

# guest NAME COMMAND runs a guest and prints its events when it has ended.
guest() {
	local began=$SECONDS
	[[ $1 != clock ]] || local -x KPROXY_VM_CLOCK=real
	KPROXY_VM_TIMEOUT=5400 KPROXY_VM_SILENCE=1200 test/vm/run.sh bash -c "$2" >"$bin/$1.json" ||
		printf '{"Action":"fail","Package":"vm (%s)"}\n' "$1" >>"$bin/$1.json"
	printf '{"Action":"stage","Package":"guest %s","Elapsed":%d}\n' "$1" $((SECONDS - began)) >>"$bin/$1.json"
	events <"$bin/$1.json"
}

rm -rf "$bin"
mkdir -p "$bin"
export CGO_ENABLED=0
go build -buildvcs=false -o "$bin/test2json" cmd/test2json

running=0
(($#)) || set -- $(printf '%s\n' "${rows[@]}" | awk '!seen[$1]++ { print $1 }')
for g in "$@"; do
	command=
	for row in "${rows[@]}"; do
		[[ $row == "$g "* ]] || continue
		package=$(awk '{ print $2 }' <<<"$row")
		if build "$package"; then
			command+=$(row_command "$row")$'\n' # which takes some seconds
		else
			printf '{"Action":"fail","Package":"build (%s)"}\n' "$row" | events
		fi
	done
	((running < $(nproc))) || { wait -n; running=$((running - 1)); }
	guest "$g" "${command}true" &
	running=$((running + 1))
done
wait
