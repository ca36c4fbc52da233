#!/usr/bin/env bash
# Publishes what release.sh has made with IMAGE: pushes both images and the chart, signs them and the
# checksums without a key (https://docs.sigstore.dev/cosign/signing/overview/), and makes a release of
# the tag on GitHub. It makes nothing itself: every image and file has the digest that is in the folder.
#
# Usage: deploy/publish.sh [--check] [FOLDER]   # dist, if none is given; --check says what would be run, and runs nothing
#
# IMAGE and VERSION are those of the release; REGISTRY_USER and GH_TOKEN may push there.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${IMAGE:?is the image, as in make release}" "${VERSION:?is the tag}"
do=
if [[ ${1:-} == --check ]]; then do=echo; shift; fi
out=${1:-dist}
[[ -s $out/kproxy-images.txt ]] || { echo "$out has no release with an image: make release IMAGE=$IMAGE" >&2; exit 1; }
(cd "$out" && sha256sum --check --quiet SHA256SUMS)
registry=${IMAGE%%/*}

if [[ -z $do ]]; then
	{ command -v skopeo && command -v gh; } >/dev/null || apt-get install -q -y skopeo gh
	for login in skopeo cosign "helm registry"; do
		# shellcheck disable=SC2086 # two words
		$login login "$registry" --username "$REGISTRY_USER" --password-stdin <<<"$GH_TOKEN"
	done
fi
while read -r name; do # registry/name:tag@digest
	tag=${name%@*}
	suffix=${tag#"$IMAGE:$VERSION"}
	$do skopeo copy --all --preserve-digests "oci-archive:$out/kproxy-$VERSION-image$suffix.tar" "docker://$tag"
	$do cosign sign --yes "$IMAGE@${name#*@}"
	for sbom in "$out/kproxy-$VERSION-image$suffix"-linux-*.cdx.json; do
		$do cosign attest --yes --type cyclonedx --predicate "$sbom" "$IMAGE@${name#*@}"
	done
done <"$out/kproxy-images.txt"
# Helm makes the manifest of a chart, and prints its digest.
charts=${IMAGE%/*}/charts
digest=$($do helm push "$out/kproxy-chart-$VERSION.tgz" "oci://$charts" 2>&1 | sed -n -e 'w /dev/stderr' -e 's/^Digest: //p')
$do cosign sign --yes "$charts/kproxy@${digest:-DIGEST}"
$do cosign sign-blob --yes --bundle "$out/SHA256SUMS.sigstore.json" "$out/SHA256SUMS"
$do gh release create "$VERSION" --verify-tag --title "$VERSION" --notes-file "$out/NOTES.md" $([[ $VERSION != *-* ]] || echo --prerelease) "$out"/*
