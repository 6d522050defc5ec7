#!/usr/bin/env bash
# Puts prometheus, promtool, alertmanager and amtool into .tools/bin.
#
# In this order: what is there already; what is on PATH (linked); Debian's packages, fetched with apt into folders of our
# own and unpacked with dpkg -x, so that no root is needed and no system service is installed or started; else it
# says what to do. A second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

TOOLS=(prometheus promtool alertmanager amtool)
BIN=$PWD/.tools/bin
APT=$PWD/.tools/apt
started=$SECONDS

say() { printf '[setup %3ds] %s\n' $((SECONDS - started)) "$*"; }

# The oldest versions that the rules and the routing are written for (keep_firing_for; match by matchers).
oldest() { case $1 in prometheus | promtool) echo 2.42.0 ;; *) echo 0.25.0 ;; esac; }

version_of() { "$1" --version 2>&1 | sed -n 's/.*version \([0-9][0-9.]*\).*/\1/p' | head -n 1; }

works() { # works TOOL FILE: FILE starts and is new enough
    local version
    version=$(version_of "$2") && [ -n "$version" ] || return 1
    [ "$(printf '%s\n%s\n' "$(oldest "$1")" "$version" | sort -V | head -n 1)" = "$(oldest "$1")" ]
}

missing() {
    local tool
    for tool in "${TOOLS[@]}"; do [ -x "$BIN/$tool" ] && works "$tool" "$BIN/$tool" || echo "$tool"; done
}

link_from_path() {
    local tool name found
    for tool in $(missing); do
        for name in "$tool" "prometheus-$tool"; do # Debian calls alertmanager prometheus-alertmanager
            found=$(PATH=$(sed "s#$BIN:\{0,1\}##g" <<<"$PATH") command -v "$name" || true)
            [ -n "$found" ] || continue
            if works "$tool" "$found"; then
                say "$tool: $found ($(version_of "$found"))"
                ln -sfn "$found" "$BIN/$tool"
                break
            fi
            say "$tool: $found is not used: $(version_of "$found") is older than $(oldest "$tool")"
        done
    done
}

apt_private() {
    local tool=$1
    shift
    # Acquire::Languages and DEP-11 are indexes we never read; the sandbox user could not write into our folders.
    "$tool" -o Dir::State::Lists="$APT/lists" -o Dir::Cache="$APT/cache" -o APT::Sandbox::User="$(id -un)" \
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false "$@"
}

fetch_from_debian() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 0
    local log=$APT/log deb
    mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial" "$APT/debs"
    say "fetching Debian's package lists (private copy in .tools/apt, no root)"
    # Hooks of the machine may fail without root although the lists arrived: the download below is the judge.
    apt_private apt-get -q update >"$log" 2>&1 || true
    say "downloading prometheus and prometheus-alertmanager"
    if ! (cd "$APT/debs" && apt_private apt-get -q download prometheus prometheus-alertmanager >>"$log" 2>&1); then
        say "apt could not fetch them; its last words (all in .tools/apt/log):"
        tail -n 5 "$log" | sed 's/^/    /'
        return 0
    fi
    for deb in "$APT"/debs/*.deb; do
        say "unpacking $(basename "$deb")"
        dpkg -x "$deb" "$PWD/.tools/root"
    done
    local tool from
    for tool in $(missing); do
        for from in "$tool" "prometheus-$tool"; do
            [ ! -x ".tools/root/usr/bin/$from" ] || ln -sfn "../root/usr/bin/$from" "$BIN/$tool"
        done
    done
    rm -rf "$APT"
}

[ -n "$(missing)" ] || exit 0
mkdir -p "$BIN"
link_from_path
[ -z "$(missing)" ] || fetch_from_debian
left=$(missing)
left=${left//$'\n'/ }
if [ -n "$left" ]; then
    cat >&2 <<TEXT

[setup] Still missing: $left
[setup] Do one of these, then run the same command again:
[setup]   Debian, Ubuntu   sudo apt install prometheus prometheus-alertmanager
[setup]   macOS            brew install prometheus alertmanager
[setup]   anywhere         unpack the releases of Prometheus (2.42 or newer) and Alertmanager (0.25 or newer) from
[setup]                    https://prometheus.io/download/ and put the four programs on PATH or into .tools/bin
TEXT
    if command -v docker >/dev/null && [ -f compose.yaml ]; then
        echo "[setup]   Docker           docker compose up    runs the whole demo in containers, without these programs" >&2
    fi
    exit 1
fi
.venv/bin/python setup/alertmanager_anywhere.py "$BIN/alertmanager"
say "monitoring programs are ready: prometheus $(version_of "$BIN/prometheus"), alertmanager $(version_of "$BIN/alertmanager")"
