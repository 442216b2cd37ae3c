#!/usr/bin/env bash
# Makes a Debian package around a program that is already built, without root.
#
#   deploy/debian/build.sh PROGRAM OUT [LEVEL]     LEVEL: of compression, 0 to 9 (default: 9)
#
# Needs dpkg-deb and binutils, and dpkg-shlibdeps (dpkg-dev) for the list of libraries that the package depends on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
program=$(realpath "$1") out=$2
level=${3:-9}

version=$("$program" -V | cut -d ' ' -f 2)
architecture=$(dpkg --print-architecture)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A folder of mktemp is closed to others, and its mode would be that of `/` in the package.
root=$work/root
share=$root/usr/share

install -d -m 755 "$root" "$root"/usr/{bin,lib/systemd/system} "$share"/man/man1 "$share"/bash-completion/completions \
    "$share"/zsh/vendor-completions "$share"/fish/vendor_completions.d "$share"/doc/gristmill/examples
strip -o "$root/usr/bin/gristmill" "$program"
chmod 755 "$root/usr/bin/gristmill"
"$program" man "$share/man/man1"
gzip -9n "$share"/man/man1/*.1
"$program" completions bash > "$share/bash-completion/completions/gristmill"
"$program" completions zsh > "$share/zsh/vendor-completions/_gristmill"
"$program" completions fish > "$share/fish/vendor_completions.d/gristmill.fish"
install -m 644 "$here/gristmill-worker@.service" "$root/usr/lib/systemd/system/"
install -m 644 "$here/labels.env" "$share/doc/gristmill/examples/"
install -m 644 "$here/copyright" "$share/doc/gristmill/copyright"
chmod -R u=rwX,go=rX "$root"

# dpkg-shlibdeps wants the folder of a source package around it.
mkdir "$work/debian"
printf 'Source: gristmill\n\nPackage: gristmill\nArchitecture: any\n' > "$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O "$root/usr/bin/gristmill" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { echo "dpkg-shlibdeps named no package: is dpkg-dev installed?"; exit 1; }

mkdir "$root/DEBIAN"
cat > "$root/DEBIAN/control" <<CONTROL
Package: gristmill
Version: $version
Architecture: $architecture
Maintainer: ${DEBFULLNAME:-gristmill} <${DEBEMAIL:-root@localhost}>
Section: science
Priority: optional
Installed-Size: $(du -ks "$root/usr" | cut -f 1)
Depends: $depends
Suggests: libcuda1
Description: Grinds whole datasets through a language model
 gristmill runs whole datasets through a language model at the lowest cost per
 token: one file describes a job, and the answers are Parquet. Each row is
 written once, however often the process is killed and started again.
CONTROL

mkdir -p "$out"
package=$out/gristmill_${version}_$architecture.deb
dpkg-deb --root-owner-group -Zxz -z"$level" --build "$root" "$package" > /dev/null
echo "$package ($(stat -c %s "$package" | awk '{ printf "%.1f", $1 / 1e6 }') MB)"
