#!/usr/bin/env bash
# Puts a Slurm controller and a Chromium into .tools, for the integration tests: Debian's packages, unpacked.
#
# A program that is on PATH is used as it is. Else the packages that this machine lacks are fetched with apt into folders of our own
# and unpacked with dpkg -x, so that no root is needed and no system service is installed or started. A second run does nothing.
# Where they cannot be had this says so and ends well: the tests that need them are skipped, and fail where CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=$PWD/.tools/bin
APT=$PWD/.tools/apt-integrations
started=$SECONDS

say() { printf '[setup %3ds] %s\n' $((SECONDS - started)) "$*"; }

apt_private() {
    local tool=$1
    shift
    # Acquire::Languages and DEP-11 are indexes we never read; the sandbox user could not write into our folders.
    "$tool" -o Dir::State::Lists="$APT/lists" -o Dir::Cache="$APT/cache" -o APT::Sandbox::User="$(id -un)" \
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false "$@"
}

update_once() {
    [ ! -d "$APT/lists" ] || return 0
    mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial"
    say "fetching Debian's package lists (private copy, no root)"
    # Hooks of the machine may fail without root although the lists arrived: the download is the judge.
    apt_private apt-get -q update >"$APT/log" 2>&1 || true
}

unpack() { # unpack FOLDER PACKAGE...: those packages, and what they need and this machine lacks, into .tools/FOLDER
    local folder=$1 missing deb
    shift
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    update_once
    missing=$(apt_private apt-get -s --no-install-recommends install "$@" 2>>"$APT/log" | awk '/^Inst/ { print $2 }')
    [ -n "$missing" ] || return 1
    rm -rf "$APT/debs" && mkdir -p "$APT/debs"
    say "downloading $(wc -w <<<"$missing") packages for $folder"
    # shellcheck disable=SC2086 # one word a package
    (cd "$APT/debs" && apt_private apt-get -q download $missing >>"$APT/log" 2>&1) || return 1
    rm -rf ".tools/$folder.new"
    for deb in "$APT"/debs/*.deb; do
        dpkg -x "$deb" ".tools/$folder.new"
    done
    rm -rf ".tools/$folder" && mv ".tools/$folder.new" ".tools/$folder"
}

have() { [ -x "$BIN/$1" ] || PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null; }

give_up() { say "$1 could not be fetched; the tests that need it are skipped. As root: apt-get install $2"; }

mkdir -p "$BIN"
have slurmctld || if unpack slurm slurmctld slurmd slurm-client munge; then
    ln -sfn ../slurm/usr/sbin/slurmctld-wlm "$BIN/slurmctld"
    say "slurmctld is ready"
else
    give_up Slurm "slurmctld slurmd slurm-client munge"
fi
have chromium || if [ -d .tools/chromium ] || unpack chromium chromium fonts-dejavu-core; then
    # The package's own start script reads /etc and would miss its unpacked libraries.
    cat >"$BIN/chromium" <<'SCRIPT'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/../chromium
lib=$root/usr/lib/$(uname -m)-linux-gnu
export LD_LIBRARY_PATH="$lib:$lib/pulseaudio${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$root/usr/lib/chromium/chromium" "$@"
SCRIPT
    chmod +x "$BIN/chromium"
    say "chromium is ready"
else
    give_up Chromium chromium
fi
# initdb and postgres are found on PATH, in Debian's own folder or in .tools/postgresql; without them the service is tested on SQLite.
have initdb || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || [ -x .tools/postgresql/bin/initdb ] || if unpack postgresql.deb postgresql; then
    ln -sfn "$(cd .tools && echo postgresql.deb/usr/lib/postgresql/*)" .tools/postgresql
    say "postgresql is ready"
else
    give_up PostgreSQL postgresql
fi
rm -rf "$APT"
