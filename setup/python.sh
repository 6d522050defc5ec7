#!/usr/bin/env bash
# Makes .venv: torch, both packages (editable), the development tools, and a folder of wheels for the packaging test.
#
# Called by make with PYTHON3, TORCH_VERSION and TORCH_INDEX. Does nothing when the last complete run had the same
# pins: what it was built from is hashed into .venv/.setup. Needs no root and changes nothing outside this folder.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON3=${PYTHON3:-python3}
TORCH_VERSION=${TORCH_VERSION:?call make setup, which knows the version of torch}
TORCH_INDEX=${TORCH_INDEX:-}
PIP_VERSION=25.3
started=$SECONDS

say() { printf '[setup %3ds] %s\n' $((SECONDS - started)) "$*"; }
fail() { echo >&2; printf '[setup] %s\n' "$@" >&2; exit 1; }

command -v "$PYTHON3" >/dev/null || fail \
    "there is no '$PYTHON3' here. Install Python 3.11 or newer (Debian: apt install python3 python3-venv)," \
    "or name one: make setup PYTHON3=/path/to/python3"
version=$("$PYTHON3" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || fail "'$PYTHON3' does not start."
"$PYTHON3" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "'$PYTHON3' is Python $version; this repository needs 3.11 or newer." \
    "Install one, or name one: make setup PYTHON3=/path/to/python3.11"

made_from=$({
    echo "$PWD $version $TORCH_VERSION $TORCH_INDEX $PIP_VERSION"
    cat setup/requirements-dev.txt setup/constraints.txt exporter/pyproject.toml remediation/pyproject.toml
} | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat .venv/.setup 2>/dev/null)" = "$made_from" ]; then
    exit 0
fi

# A virtual environment that was copied, or made by another Python, is made again.
if [ -e .venv ] && [ "$(.venv/bin/python -c 'import sys; print(sys.prefix, "%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" \
    != "$PWD/.venv $version" ]; then
    say ".venv belongs to another place or another Python: removing it"
    rm -rf .venv
fi
if [ ! -d .venv ]; then
    say "making .venv with Python $version"
    "$PYTHON3" -m venv .venv 2>/dev/null || {
        # Debian's python3 without python3-venv has no ensurepip; an outside pip can do its work.
        rm -rf .venv
        "$PYTHON3" -m venv --without-pip .venv && "$PYTHON3" -m pip --python .venv/bin/python install -qq pip
    } || { rm -rf .venv; fail "python3 cannot make virtual environments here. Debian: apt install python3-venv"; }
fi
rm -f .venv/.setup

PIP=(.venv/bin/python -m pip --disable-pip-version-check)
offline="Is the package index within reach? (pip's own message stands above)"

say "pip $PIP_VERSION"
"${PIP[@]}" install -qq "pip==$PIP_VERSION" || fail "$offline"

say "torch $TORCH_VERSION ${TORCH_INDEX:+from $TORCH_INDEX} (the largest download)"
"${PIP[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -qq "torch==$TORCH_VERSION" || fail \
    "pip could not install torch $TORCH_VERSION for Python $version." \
    "Another version: make setup TORCH_VERSION=...   A smaller CPU build: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"

say "development tools"
"${PIP[@]}" install -qq -c setup/constraints.txt -r setup/requirements-dev.txt || fail "$offline"

say "sdcwatch and sdcwatch-remediation (editable)"
"${PIP[@]}" install -qq -c setup/constraints.txt --no-build-isolation -e exporter -e remediation || fail "$offline"
"${PIP[@]}" check || fail "the pins in setup/constraints.txt contradict each other or a pyproject.toml (see above)"

say "wheels for the packaging test"
rm -rf .cache/wheelhouse
"${PIP[@]}" wheel -qq -c setup/constraints.txt --no-build-isolation -w .cache/wheelhouse ./exporter ./remediation \
    || fail "$offline"
rm -f .cache/wheelhouse/sdcwatch*.whl # the test builds its own

echo "$made_from" >.venv/.setup
say "Python is ready: $(.venv/bin/python -c 'import torch; print("torch", torch.__version__)')"
