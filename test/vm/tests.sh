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
# arguments. A guest's rows run one after another in one boot, and guests start in this order, as many
# at a time as there are processors, as more would only make each other slow: the longest first. The arguments #1/3, #2/3
# and #3/3 share out the tests of mode ipvs. A guest is busy, not waiting: each test costs what it
# computes, several times what it does natively. So only those run here that depend on
# the kernel: of mode ipvs those whose subject is a data plane; of mode iptables what one kernel's
# tables, sets and connection tracking could do otherwise than another's, unless mode ipvs or nftables shows it on this kernel.
. test/e2e/planes.sh
ipvs="^Test($planes|IPVS.*|AutoTakesWhatThereIs|Compare)\$"
tables="OffloadByItself|DamageIsRepaired|IPTablesLegacyVariant|InvalidPackets|UDPFlowsFollowChanges"
tables+="|CleanupLeavesWhatIsForeign|ForgottenConnectionsGoOn|IPTablesAffinityEnds"
# Takeovers and chaos have a guest of their own: with their streams they take a whole one.
skip="^TestTakeover\$"
# What goes by userspace only; rules of the legacy variant, which row iptables has on this kernel.
skip+="|^TestServiceIsEdited\$/^userspace\$|^TestUDPFlowsFollowChanges\$/^userspace\$|^TestTraceNamesFaults\$/^userspace\$|^TestAnotherProxy\$/userspace\$"
skip+="|^Test(DamageIsRepaired|CleanupLeavesWhatIsForeign)\$/^legacy\$"
# Single parts of the way to userspace that are mended, which modes share; the whole of it, and what leads to IPVS, stay.
skip+="|^TestDamageIsRepaired\$/^nft\$/^(the_first_chain|the_jumps|mangle|entries_are|the_endpoints|the_heartbeat|the_routing)"
# Ways of telling pods from others, by rules that all modes share, and sums of two configurations that stay.
skip+="|^TestFlows\$/^ipvs\$/^(by-.*|on-bridge|detector-and-all)\$|^TestTraceFlows\$/^ipvs\$/^plain\$|$same"
# Of rules of iptables in variant nft, mode ipvs has on this kernel all but a service's own.
nft="^Test(DamageIsRepaired|CleanupLeavesWhatIsForeign)\$/^nft\$"
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
	"nftables test/e2e      (vm,nftables,nolog) KPROXY_E2E_MODE=nftables KPROXY_E2E_LOG=none -test.run=^Test(Flows|RestartIsHitless|KernelWithoutLog)\$/^(nftables)?\$/^(plain)?\$"
	"nftables kernel/nftables (vm,nftables) -test.run=^Test(Walk|Packets|SourceHash|Flowtable)\$"
	"ipvs-1   test/e2e      (vm,ipvs,1)     KPROXY_E2E_MODE=ipvs -test.skip=$skip #1/3"
	"ipvs-2   test/e2e      (vm,ipvs,2)     KPROXY_E2E_MODE=ipvs -test.skip=$skip #2/3"
	"ipvs-3   test/e2e      (vm,ipvs,3)     KPROXY_E2E_MODE=ipvs -test.skip=$skip #3/3"
	"kernel   kernel/ipvs   (vm)            -test.skip=$models|$auto"
	"kernel   kernel/ipvs   (vm,bench)      -test.run=^\$ -test.bench=. -test.benchtime=1x"
	"kernel   kernel        (vm)"
	"kernel   kernel/leftovers (vm)"
	"kernel   trace         (vm)            -test.run=^Test(TrafficControlIsNamed|BridgesByExpression)\$"
	"kernel   test/golden   (vm)            -test.run=^TestKernel\$"
	"iptables test/e2e      (vm,iptables)   KPROXY_E2E_MODE=iptables -test.run=^Test($tables)\$ -test.skip=$nft"
	"iptables test/e2e      (vm,flows)      KPROXY_E2E_MODE=iptables -test.run=^TestFlows\$/^iptables\$/^plain\$"
	"docs     test/docs     (vm)            -test.run=^TestIPVSPage\$"
	"docs     test/deploy   (vm)            -test.run=^TestServe\$/^nft,_firewall_true\$"
)
# Takeovers and chaos come with more streams than an emulated processor carries.
[[ ${KPROXY_VM_ACCEL:-$(test/vm/prepare.sh | tail -n 1)} != kvm ]] || rows+=(
	"takeover test/e2e      (vm,ipvs,takeover) KPROXY_E2E_MODE=ipvs -test.run=^TestTakeover\$"
	"takeover test/e2e      (vm,ipvs,chaos) KPROXY_E2E_MODE=ipvs KPROXY_CHAOS=15s KPROXY_CHAOS_SHARE=0.1 -test.run=^TestChaos\$"
)

binary() { echo "$bin/${1//\//-}.test"; }

# build PACKAGE makes what its guests run, unless it was made for others: static, as dynamic linking costs most where it is emulated,
# and without what debuggers read. It takes the time that guests leave.
build() { [[ -e $(binary "$1") ]] || chrt --idle 0 go test -buildvcs=false -ldflags='-s -w' -c -o "$(binary "$1")" "./$1"; }

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

# guest NAME COMMAND writes events into the guest's own file, as lines of two writers would mix.
guest() {
	KPROXY_VM_TIMEOUT=2700 test/vm/run.sh bash -c "$2" >"$bin/$1.json" ||
		printf '{"Action":"fail","Package":"vm (%s)"}\n' "$1" >>"$bin/$1.json"
}

rm -rf "$bin"
mkdir -p "$bin"
export CGO_ENABLED=0
go build -buildvcs=false -o "$bin/test2json" cmd/test2json
running=0
guests=($(printf '%s\n' "${rows[@]}" | awk '!seen[$1]++ { print $1 }'))
for g in "${guests[@]}"; do
	command=
	for row in "${rows[@]}"; do
		[[ $row == "$g "* ]] || continue
		package=$(awk '{ print $2 }' <<<"$row")
		if build "$package"; then
			command+=$(row_command "$row")$'\n' # which takes some seconds
		else
			printf '{"Action":"fail","Package":"build (%s)"}\n' "$row" >>"$bin/builds.json"
		fi
	done
	((running < $(nproc))) || { wait -n; running=$((running - 1)); }
	guest "$g" "${command}true" &
	running=$((running + 1))
done
wait
cat "$bin"/*.json
