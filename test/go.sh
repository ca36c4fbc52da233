#!/usr/bin/env bash
# Installs Go in /usr/local/go: the toolchain that Go itself would fetch from the module
# proxy (https://go.dev/doc/toolchain#download), checked as Go does, by the hash of its files
# that the checksum database has. Needs root, curl and unzip.
#
# Usage: test/go.sh go1.26.8
set -euo pipefail
into=/usr/local/go
proxy=https://proxy.golang.org
arch=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
module=golang.org/toolchain@v0.0.1-$1.linux-$arch

if [[ -e $into ]]; then
	echo "$into is there already and older than $1: remove it, then come again" >&2
	exit 3
fi
echo "installing $1 in $into"
work=$(mktemp -d -p "$(dirname "$into")")
trap 'rm -rf "$work"' EXIT
curl -fsSL -o "$work/go.zip" "$proxy/${module/@//@v/}.zip"
# Lines of MODULE VERSION HASH.
want=$(curl -fsSL "$proxy/sumdb/sum.golang.org/lookup/$module" | awk -v of="${module/@/ }" '$1 " " $2 == of { print $3 }')
unzip -q "$work/go.zip" -d "$work"

# The hash "h1" of golang.org/x/mod/sumdb/dirhash.
cd "$work"
have=h1:$(find golang.org -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum |
	cut -d ' ' -f 1 | tr -d '\n' | tr a-f A-F | basenc --base16 -d | base64)
if [[ $have != "$want" ]]; then
	echo "$module has the hash $have, and the checksum database says ${want:-nothing}" >&2
	exit 1
fi
# Modules have no executable files; Go makes them so too.
chmod -R a+rX "$module"
chmod a+x "$module"/bin/* "$module"/pkg/tool/*/*
mv "$module" "$into"
