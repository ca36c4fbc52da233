# The targets people type. What they do is in test/setup.sh and test/run.sh.

export PATH := $(PATH):/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

VERSION := $(or $(VERSION),$(shell git describe --tags --always --dirty 2>/dev/null || echo dev))
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)

DOCKER ?= docker
IMAGE  ?= kproxy:latest

.PHONY: help build check demo demo-ipvs vm test test-again race mutants soak conformance bench bench-go image notes release size publish test-arm64 test-kernels golden-update clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/kproxy
	@test/setup.sh build
	CGO_ENABLED=0 GOGC=off GOMEMLIMIT=1GiB go build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' -o bin/kproxy ./cmd/kproxy

demo: ## set all up, build, and show kproxy at work on real packets (as root, about a minute; MODE=nftables: in that mode)
	@[ "$$(id -u)" = 0 ] || { echo "make demo builds a network of namespaces, which needs root: sudo make demo" >&2; exit 3; }
	@test/setup.sh run
	@$(MAKE) --no-print-directory build
	bin/kproxy lab demo $(if $(MODE),--mode $(MODE))

demo-ipvs: ## the same through IPVS, in a VM with Debian's kernel, on any x86-64 Linux with qemu
	@test/setup.sh vm
	@$(MAKE) --no-print-directory build
	test/vm/run.sh bin/kproxy lab demo --mode ipvs

vm: ## run a command as root in the VM: make vm CMD='ipvsadm -Ln'
	@[ -n "$$CMD" ] || { echo "say what to run: make vm CMD='ipvsadm -Ln'" >&2; exit 2; }
	@test/setup.sh vm
	@test/vm/run.sh bash -c "$$CMD"

check: ## in less than a minute: the checks and the unit tests of what differs from main
	@test/setup.sh build
	@test/run.sh check

test: ## set all up and run every check and test (as root: also those with real packets)
	@test/setup.sh test
	@$(MAKE) --no-print-directory build
	@test/run.sh

test-again: ## make test N times, every second time beside a load on all processors: what each stage took and what failed (hours; N=10)
	@test/setup.sh test
	@$(MAKE) --no-print-directory build
	@test/again.sh $(or $(N),10)

race: ## the race detector on all packages, also on those that import Kubernetes' API, which make test leaves out (as root, minutes)
	@test/setup.sh test
	CGO_ENABLED=1 go test -buildvcs=false -race -vet=off -timeout 30m $$(go list ./... | grep -vE '/test/(e2e|vm)$$')

mutants: ## break one decision of the product after the other, and see that a test turns red for each (as root, a quarter of an hour; ONLY='plan ipvs')
	@[ "$$(id -u)" = 0 ] || { echo "make mutants runs tests that build networks of namespaces, which needs root: sudo make mutants" >&2; exit 3; }
	@test/setup.sh test
	CGO_ENABLED=0 GOFLAGS="$(GOFLAGS) -buildvcs=false -trimpath" go run ./test/mutants $(ONLY)

conformance: ## upstream's network tests against a cluster on this machine (as root, long; QUICK=1: a dozen; MODE, NODES, FOCUS, POD_NETWORK, KUBERNETES, ROLLOUT=1, PLUGIN=1, README=1: docs/conformance.md)
	@[ "$$(id -u)" = 0 ] || { echo "make conformance builds a cluster of namespaces, which needs root: sudo make conformance" >&2; exit 3; }
	@test/setup.sh conformance
	go build -buildvcs=false -o bin/conformance/ ./test/conformance
	@programs=$$(test/conformance/build.sh) && bin/conformance/conformance -programs "$$programs" $(if $(MODE),-modes $(MODE)) $(if $(NODES),-nodes $(NODES)) \
		$(if $(FOCUS),-focus '$(FOCUS)') $(if $(POD_NETWORK),-pod-network $(POD_NETWORK)) $(if $(QUICK),-quick) $(if $(ROLLOUT),-rollout) $(if $(PLUGIN),-plugin) $(if $(README),-readme)

soak: ## takeovers, kills, stops, flushes and API losses at random for an hour (as root; DURATION=5m in each of three modes; SEED repeats a run)
	@[ "$$(id -u)" = 0 ] || { echo "make soak builds networks of namespaces, which needs root: sudo make soak" >&2; exit 3; }
	@test/setup.sh run
	@$(MAKE) --no-print-directory build
	for mode in iptables nftables; do KPROXY_BIN=$(CURDIR)/bin/kproxy KPROXY_E2E_MODE=$$mode KPROXY_CHAOS=$(or $(DURATION),20m) KPROXY_CHAOS_SHARE=1 KPROXY_SEED=$(SEED) \
		go test -buildvcs=false -count=1 -timeout 3h -v -run '^TestChaos$$' ./test/e2e || exit; done

bench: ## measure kproxy beside its peers (as root, long; QUICK=1: each once, in minutes, to see that it works)
	@[ "$$(id -u)" = 0 ] || { echo "make bench builds networks of namespaces, which needs root: sudo make bench" >&2; exit 3; }
	@test/setup.sh bench
	@$(MAKE) --no-print-directory build
	@test/bench/bench.sh $(if $(QUICK),quick)

bench-go: ## Go's micro-benchmarks, ten times each, for benchstat
	@test/setup.sh build
	go test -buildvcs=false -run '^$$' -bench . -benchmem -count 10 -p 1 -timeout 60m ./...

image: ## the image for deploy/, with docker or a program like it: make image IMAGE=registry/kproxy:v1; TARGET=nftables: the small one
	$(DOCKER) build -f deploy/Dockerfile $(if $(TARGET),--target $(TARGET)) --build-arg VERSION=$(VERSION) --build-arg COMMIT=$(COMMIT) -t $(IMAGE) .

notes: ## what CHANGELOG.md says of a release: make notes VERSION=v1.2.3
	@VERSION=$(VERSION) deploy/notes.sh

release: ## what a release consists of, in dist/ (as root, on Debian); IMAGE=registry/name: with a chart and manifests that name the image there
	@test/setup.sh build
	@VERSION=$(VERSION) IMAGE=$(if $(filter-out file,$(origin IMAGE)),$(IMAGE)) deploy/release.sh

publish: ## push and sign what make release IMAGE=… made, and make a release on GitHub of it; CHECK=1: say what that would run
	@VERSION=$(VERSION) IMAGE=$(IMAGE) deploy/publish.sh $(if $(CHECK),--check)

test-arm64: ## kproxy built for arm64, and unit tests of the packages without I/O on an emulated one
	@test/setup.sh arm64
	GOARCH=arm64 CGO_ENABLED=0 go build -buildvcs=false -trimpath -o bin/kproxy-arm64 ./cmd/kproxy
	GOARCH=arm64 CGO_ENABLED=0 go test -buildvcs=false -vet=off -count=1 -exec qemu-aarch64-static ./service ./lb ./health ./plan ./kernel/netlink ./userspace/handover ./source/strict ./config

test-kernels: ## in VMs with Debian's kernels 6.1 and 6.12: the demonstration and what the data planes do, in every mode (as root, an hour)
	@test/setup.sh vm
	@$(MAKE) --no-print-directory build
	@go build -o bin/report ./test/report && test/vm/kernels.sh | bin/report

size: ## lines of Go outside tests, without blank ones and comments, by what they are for
	@git ls-files '*.go' ':!*_test.go' | xargs awk '\
		function of(f) { return f ~ /^test\// ? "test helpers" : f ~ /^lab\/|^cmd\/kproxy\/lab/ ? "teaching" : f ~ /^(trace|web|cmd\/kproxy\/(screen|cluster))\// ? "seeing" : "product" } \
		!/^[ \t]*(\/\/.*)?$$/ { lines[of(FILENAME)]++; all++ } \
		END { for (c in lines) printf "%-14s %6d\n", c, lines[c]; printf "%-14s %6d\n", "all", all }' | sort -k2

golden-update: ## rewrite the goldens; read the difference before you commit it
	@test/setup.sh build
	go test -buildvcs=false ./test/golden -update
	git diff --stat -- test/golden

clean: ## remove what was built
	rm -rf bin dist
