#!/usr/bin/env bash
# Makes a release: static binaries for amd64 and arm64, both images for each processor as a tar for
# `docker load`, `podman load` and `ctr images import` (an OCI layout that also has Docker's
# manifest), and for all processors as an OCI layout to be pushed (publish.sh), what each is made of
# (SBOM, CycloneDX), kubectl's plugin, as an archive and a manifest for krew each, the Helm chart, the
# notes, and SHA256SUMS. With IMAGE, a registry's name without a tag, the chart names the image by its
# digest, and so do manifests for kubectl apply -f. The same commit, Go and Debian packages make the same bytes.
#
# On Debian, as root, as the image's root file system is made of Debian's packages
# (rootfs.sh) unless KPROXY_ROOTFS names a folder with one for each processor.
#
# Usage: deploy/release.sh [FOLDER]   # dist, if none is given
#
# KPROXY_ARCHITECTURES are others than both, KPROXY_DOWNLOADS is where krew will find the release.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin
version=${VERSION:-$(git describe --tags --always --dirty)}
commit=$(git rev-parse --short=12 HEAD)
epoch=$(git log -1 --format=%ct)
created=$(date -u -d "@$epoch" +%FT%TZ)
architectures=${KPROXY_ARCHITECTURES:-amd64 arm64}
image=${IMAGE:-}
[[ ${image##*/} != *[:@]* ]] || { echo "IMAGE=$image: leave the tag out, it is the version" >&2; exit 2; }
out=$(realpath -m "${1:-dist}")
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

pack() { tar --create --format=gnu --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner -C "$1" "${2:-.}"; }
digest() { sha256sum "$1" | cut -d ' ' -f 1; }

# sbom NAME reads lines 'name version purl' and prints them as a bill of materials.
sbom() {
	sort -u | awk -v name="$1" -v version="$version" -v created="$created" '
		BEGIN {
			printf "{\"bomFormat\":\"CycloneDX\",\"specVersion\":\"1.6\",\"version\":1,\"metadata\":{\"timestamp\":\"%s\",", created
			printf "\"component\":{\"type\":\"application\",\"name\":\"%s\",\"version\":\"%s\"}},\"components\":[", name, version
		}
		{ printf "%s\n{\"type\":\"library\",\"bom-ref\":\"%s\",\"name\":\"%s\",\"version\":\"%s\",\"purl\":\"%s\"}", (NR == 1 ? "" : ","), $3, $1, $2, $3 }
		END { print "\n]}" }'
}

# modules BINARY prints the Go modules that are in it, and Go.
modules() {
	go version -m "$1" | awk '
		NR == 1 { sub(/^go/, "", $2); print "stdlib", $2, "pkg:golang/std@" $2 }
		$1 == "dep" { print $2, $3, "pkg:golang/" $2 "@" $3 }'
}

# packages ROOT prints the Debian packages that are in it.
packages() {
	[[ -d $1/var/lib/dpkg ]] || return 0
	awk '/^Package:/ { name = $2 } /^Version:/ { version = $2 }
		/^Architecture:/ { print name, version, "pkg:deb/debian/" name "@" version "?arch=" $2 }' "$1"/var/lib/dpkg/status.d/*
}

binaries() {
	local arch file
	for arch in $architectures; do
		file=$out/kproxy-$version-linux-$arch
		CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -buildvcs=false -trimpath \
			-ldflags "-s -w -X main.version=$version -X main.commit=$commit" -o "$file" ./cmd/kproxy
		modules "$file" | sbom kproxy >"$file.cdx.json"
	done
}

# plugin packs each binary under the name by which kubectl finds plugins, and writes krew's manifest
# (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/).
plugin() {
	local arch archive
	cat >"$out/kproxy.yaml" <<-END
		apiVersion: krew.googlecontainertools.github.com/v1alpha2
		kind: Plugin
		metadata:
		  name: kproxy
		spec:
		  version: $version
		  homepage: https://kproxy.dev
		  shortDescription: Ask kproxy on all nodes of a cluster
		  description: |
		    What each service does on which node and where nodes differ, where a pod's
		    connection goes, connections, events, rates and drift, by the API server
		    and with your rights.
		  platforms:
	END
	for arch in $architectures; do
		archive=kubectl-kproxy-$version-linux-$arch.tar.gz
		mkdir -p "$tmp/plugin-$arch"
		install -m 755 "$out/kproxy-$version-linux-$arch" "$tmp/plugin-$arch/kubectl-kproxy"
		install -m 644 LICENSE "$tmp/plugin-$arch/"
		pack "$tmp/plugin-$arch" | gzip -n >"$out/$archive"
		cat >>"$out/kproxy.yaml" <<-END
			  - selector: {matchLabels: {os: linux, arch: $arch}}
			    uri: ${KPROXY_DOWNLOADS:-https://kproxy.dev/releases}/$version/$archive
			    sha256: $(digest "$out/$archive")
			    bin: kubectl-kproxy
		END
	done
}

# chart packs the Helm chart, in which deploy/base is a link, for this version.
chart() {
	mkdir -p "$tmp/chart"
	cp -rL deploy/helm/kproxy "$tmp/chart/"
	sed -i "s/^appVersion:.*/appVersion: \"$version\"/" "$tmp/chart/kproxy/Chart.yaml"
	if [[ $version =~ ^v([0-9]+\.[0-9]+\.[0-9]+.*)$ ]]; then
		sed -i "s/^version:.*/version: ${BASH_REMATCH[1]}/" "$tmp/chart/kproxy/Chart.yaml"
	fi
	if [[ -n $image ]]; then
		sed -i "s|^  repository:.*|  repository: $image|; s|^  digest:.*|  digest: $(<"$tmp/digest")|; /# Yours to build/d" "$tmp/chart/kproxy/values.yaml"
	fi
	pack "$tmp/chart" kproxy | gzip -n >"$out/kproxy-chart-$version.tgz"
}

# manifests writes what kubectl apply -f takes, for every kustomization that stands by itself.
manifests() {
	local folder name
	for folder in deploy deploy/overlays/*; do
		name=$(basename "$folder")
		(cd test/helm && GOFLAGS=-mod=mod go run -buildvcs=false ./render "../../$folder" "$image@$(<"$tmp/digest")") >"$out/kproxy-${name/deploy/cluster}.yaml"
	done
	printf '%s\n' "$image:$version@$(<"$tmp/digest")" "$image:$version-nftables@$(<"$tmp/digest-nftables")" >"$out/kproxy-images.txt"
	sed -E 's/(.*)@sha256:(.*)/\2  \1/' "$out/kproxy-images.txt" >"$out/kproxy-images.sha256" # as sha256sum prints: what provenance is attested for
}

# blob MEDIA-TYPE FILE makes a file a blob of the layout and prints what refers to it.
blob() {
	local sum
	sum=$(digest "$2")
	mv "$2" "$tmp/layout/blobs/sha256/$sum"
	printf '{"mediaType":"%s","digest":"sha256:%s","size":%d}' "$1" "$sum" "$(stat -c %s "$tmp/layout/blobs/sha256/$sum")"
}

# layout empties the layout.
layout() {
	rm -rf "$tmp/layout"
	mkdir -p "$tmp/layout/blobs/sha256"
	printf '{"imageLayoutVersion":"1.0.0"}' >"$tmp/layout/oci-layout"
}

types=application/vnd.oci.image

# image TARGET ARCH does what deploy/Dockerfile says, for one of its targets, "" or nftables, and prints what refers to the image.
image() {
	local root=$tmp/root tag=$version${1:+-$1} name=kproxy-$version-image${1:+-$1}-linux-$2 config layer manifest contents
	rm -rf "$root"
	layout
	if [[ -n ${KPROXY_ROOTFS:-} && -z $1 ]]; then mkdir "$root" && cp -a "$KPROXY_ROOTFS/$2/." "$root"; else KPROXY_ARCH=$2 deploy/rootfs.sh "$root" "$1" >&2; fi
	install -m 755 "$out/kproxy-$version-linux-$2" "$root/usr/local/bin/kproxy"
	{ modules "$root/usr/local/bin/kproxy"; packages "$root"; } | sbom kproxy-image >"$out/$name.cdx.json"

	pack "$root" >"$tmp/layer"
	contents=$(digest "$tmp/layer")
	gzip -n "$tmp/layer"
	printf '{"created":"%s","architecture":"%s","os":"linux","config":{"Env":["PATH=/usr/local/bin:/usr/sbin:/usr/bin"],"Entrypoint":["/usr/local/bin/kproxy"],"Cmd":["run"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
		"$created" "$2" "$contents" >"$tmp/config"
	layer=$(blob $types.layer.v1.tar+gzip "$tmp/layer.gz")
	config=$(blob $types.config.v1+json "$tmp/config")
	printf '{"schemaVersion":2,"mediaType":"%s","config":%s,"layers":[%s]}' $types.manifest.v1+json "$config" "$layer" >"$tmp/manifest"
	manifest=$(blob $types.manifest.v1+json "$tmp/manifest")
	printf '{"schemaVersion":2,"manifests":[%s,"annotations":{"org.opencontainers.image.ref.name":"%s","io.containerd.image.name":"docker.io/library/kproxy:%s"}}]}' \
		"${manifest%\}}" "$tag" "$tag" >"$tmp/layout/index.json"
	printf '[{"Config":"blobs/sha256/%s","RepoTags":["kproxy:%s"],"Layers":["blobs/sha256/%s"]}]' \
		"$(sed -E 's/.*sha256:([0-9a-f]+).*/\1/' <<<"$config")" "$tag" "$(sed -E 's/.*sha256:([0-9a-f]+).*/\1/' <<<"$layer")" >"$tmp/layout/manifest.json"
	pack "$tmp/layout" >"$out/$name.tar"
	printf '%s,"platform":{"os":"linux","architecture":"%s"}}' "${manifest%\}}" "$2"
}

# images TARGET makes a target's images, and the layout of all, whose index is what a registry knows them by.
images() {
	local arch all=() index
	for arch in $architectures; do all+=("$(image "$1" "$arch")"); done
	layout
	for arch in $architectures; do
		tar -xf "$out/kproxy-$version-image${1:+-$1}-linux-$arch.tar" -C "$tmp/layout" ./blobs
	done
	printf '{"schemaVersion":2,"mediaType":"%s","manifests":[%s]}' $types.index.v1+json "$(IFS=,; echo "${all[*]}")" >"$tmp/index"
	index=$(blob $types.index.v1+json "$tmp/index")
	printf '{"schemaVersion":2,"manifests":[%s,"annotations":{"org.opencontainers.image.ref.name":"%s"}}]}' "${index%\}}" "$version${1:+-$1}" >"$tmp/layout/index.json"
	pack "$tmp/layout" >"$out/kproxy-$version-image${1:+-$1}.tar"
	sed -E 's/.*(sha256:[0-9a-f]+).*/\1/' <<<"$index" >"$tmp/digest${1:+-$1}"
}

rm -rf "$out"
mkdir -p "$out"
VERSION=$version deploy/notes.sh >"$out/NOTES.md"
binaries
plugin
images ""
images nftables
chart
if [[ -n $image ]]; then manifests; fi
(cd "$out" && sha256sum kproxy* kubectl-* NOTES.md >SHA256SUMS)
ls -l "$out"
