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

# A row is its guest, a package, what tells this run of it, and its environment and
# arguments. A guest's rows run one after another in one boot, and guests of a kind start in this order: the longest first. The arguments #1/2 and #2/2
# share out the tests of mode ipvs. Guests uml-* are user-mode Linux where that boots, whose iptables are the legacy variant; the
# others, and all where it doesn't, are emulated, where each test costs several times what it does natively. So only those run there
# that need nftables as well; and of mode iptables, on either, what one kernel's
# tables, sets and connection tracking could do otherwise than another's, unless mode nftables shows it on this kernel.
. test/e2e/planes.sh
ipvs="^Test($planes|IPVS.*|AutoTakesWhatThereIs|Compare)\$"
tables="OffloadByItself|DamageIsRepaired|IPTablesLegacyVariant|InvalidPackets|UDPFlowsFollowChanges|ForgottenConnectionsGoOn|IPTablesAffinityEnds"
# Of patterns that begin alike the first counts, so the shorter ones come first.
# Takeovers and chaos have a guest of their own: with their streams they take a whole one.
skip="^TestTakeover\$"
# What goes by userspace only.
skip+="|^TestServiceIsEdited\$/^userspace\$|^TestUDPFlowsFollowChanges\$/^userspace\$|^TestTraceNamesFaults\$/^userspace\$|^TestAnotherProxy\$/userspace\$"
# Single parts of the way to userspace that are mended, which modes share; the whole of it, and what leads to IPVS, stay.
skip+="|^TestDamageIsRepaired\$/./^(the_first_chain|the_jumps|mangle|entries_are|the_endpoints|the_heartbeat|the_routing)"
# Ways of telling pods from others, by rules that all modes share, and sums of two configurations that stay.
skip+="|^TestFlows\$/^ipvs\$/^(by-.*|on-bridge|detector-and-all)\$|^TestTraceFlows\$/^ipvs\$/^plain\$|$same"
# What stops a packet by nftables is the same in every mode, and so are rules of iptables' variant nft in mode iptables.
skip+="|^TestTraceNamesFaults\$/./^(a_dormant_table|a_nat_chain_that_was|firewalld|generous_limits|the_endpoint.s_nftables|the_length|what_has_the_service.s_address_is_dropped)"
nft="^TestDamageIsRepaired\$/^nft\$"
# What takes nftables besides IPVS.
both="AutoTakesWhatThereIs|IPVSModeChanges|CleanupLeavesWhatIsForeign"
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
	"uml-1    test/e2e      (vm,ipvs,1)     KPROXY_E2E_MODE=ipvs -test.skip=^Test($both)\$|$nft|$skip #1/2"
	"nft      test/e2e      (vm,ipvs,nft)   KPROXY_E2E_MODE=ipvs -test.run=^Test($both)\$ -test.skip=^TestCleanupLeavesWhatIsForeign\$/^legacy\$"
	"uml-2    test/e2e      (vm,ipvs,2)     KPROXY_E2E_MODE=ipvs -test.skip=^Test($both)\$|$nft|$skip #2/2"
	"nftables test/e2e      (vm,nftables,nolog) KPROXY_E2E_MODE=nftables KPROXY_E2E_LOG=none -test.run=^Test(Flows|RestartIsHitless|KernelWithoutLog)\$/^(nftables)?\$/^(plain)?\$"
	"nftables kernel/nftables (vm,nftables) -test.run=^Test(Packets|SourceHash|Flowtable)\$"
	"uml-3    test/e2e      (vm,iptables)   KPROXY_E2E_MODE=iptables -test.run=^Test($tables)\$ -test.skip=$nft"
	"uml-3    test/e2e      (vm,flows)      KPROXY_E2E_MODE=iptables -test.run=^TestFlows\$/^iptables\$/^plain\$"
	"uml-3    test/golden   (vm)            -test.run=^TestKernel\$"
	"whole    test/deploy   (vm)            -test.run=^TestServe\$/^nft,_firewall_true\$"
	"whole    kernel/leftovers (vm)         -test.run=^TestLeftoverServers\$"
	"whole    trace         (vm)            -test.run=^Test(TrafficControlIsNamed|BridgesByExpression)\$"
	"uml-4    kernel/ipvs   (vm)            -test.skip=$models|$auto"
	"uml-4    kernel/ipvs   (vm,bench)      -test.run=^\$ -test.bench=. -test.benchtime=1x"
	"uml-4    kernel        (vm)            -test.skip=^TestSentIsFiltered\$"
	"uml-4    test/docs     (vm)            -test.run=^TestIPVSPage\$"
)
# Takeovers and chaos come with more streams than an emulated processor carries.
accel=${KPROXY_VM_ACCEL:-$(test/vm/prepare.sh | tail -n 1)}
light=$accel # what guests uml-* are
[[ -n ${KPROXY_VM_ACCEL:-} || $accel == kvm ]] || ! KPROXY_VM_ACCEL=uml KPROXY_VM_TIMEOUT=60 test/vm/run.sh true 2>/dev/null || light=uml
[[ $accel != kvm ]] || rows+=(
	"takeover test/e2e      (vm,ipvs,takeover) KPROXY_E2E_MODE=ipvs -test.run=^TestTakeover\$"
	"takeover test/e2e      (vm,ipvs,chaos) KPROXY_E2E_MODE=ipvs KPROXY_CHAOS=15s KPROXY_CHAOS_SHARE=0.1 -test.run=^TestChaos\$"
)

binary() { echo "$bin/${1//\//-}.test"; }

# build PACKAGE makes what its guests run, unless it was made for others: static, as dynamic linking costs most where it is emulated,
# and without what debuggers read. It takes the time that guests leave.
build() {
	(
		flock 9
		[[ -e $(binary "$1") ]] || chrt --idle 0 go test -buildvcs=false -ldflags='-s -w' -c -o "$(binary "$1")" "./$1"
	) 9>"$(binary "$1").lock"
}

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
	[[ $1 != uml-* ]] || export KPROXY_VM_ACCEL=$light
	KPROXY_VM_TIMEOUT=2700 test/vm/run.sh bash -c "$2" >"$bin/$1.json" ||
		printf '{"Action":"fail","Package":"vm (%s)"}\n' "$1" >>"$bin/$1.json"
	events <"$bin/$1.json"
}

rm -rf "$bin"
mkdir -p "$bin"
export CGO_ENABLED=0
go build -buildvcs=false -o "$bin/test2json" cmd/test2json

# run N GUEST... runs guests, N at a time.
run() {
	local g row package command running=0
	for g in "${@:2}"; do
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
		((running < $1)) || { wait -n; running=$((running - 1)); }
		guest "$g" "${command}true" &
		running=$((running + 1))
	done
	wait
}

guests=$(printf '%s\n' "${rows[@]}" | awk '!seen[$1]++ { print $1 }')
if [[ $light == uml ]]; then # which wait for half of their time, and leave it to an emulated processor for every two of the machine's
	run $((($(nproc) + 1) / 2)) $(grep -v '^uml-' <<<"$guests") &
	emulated=$!
	run "$(nproc)" $(grep '^uml-' <<<"$guests") &
	status=0
	wait $! || status=1
	wait $emulated || status=1
	exit $status
else
	run "$(nproc)" $guests
fi
