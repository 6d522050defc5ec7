#!/usr/bin/env bash
# Makes .venv-libraries: the libraries of setup/requirements-integrations.txt on top of .venv, which it sees but never
# changes. torch stays the one of .venv: nothing here may install another.
set -euo pipefail
cd "$(dirname "$0")/.."
made_from=$(cat setup/requirements-integrations.txt .venv/.setup | sha256sum | cut -d' ' -f1)
[ "$(cat .venv-libraries/.setup 2>/dev/null)" = "$made_from" ] && exit 0

fail() { printf '[setup] %s\n' "$@" >&2; exit 1; }
echo "[setup] .venv-libraries: transformers, Accelerate, Lightning"
rm -rf .venv-libraries
.venv/bin/python -m venv --without-pip .venv-libraries || fail "python cannot make a virtual environment here"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$(.venv/bin/python -c "$purelib")')" >"$(.venv-libraries/bin/python -c "$purelib")/base.pth"
# Every version is pinned, so nothing has to be resolved, and nothing can bring a torch of its own.
.venv/bin/python -m pip --disable-pip-version-check --python .venv-libraries/bin/python install -qq --no-deps \
    -r setup/requirements-integrations.txt || fail "Is the package index within reach? (pip's own message stands above)"
.venv-libraries/bin/python -c 'import torch, sys; sys.exit(".venv-libraries" in torch.__file__)' \
    || fail "another torch came into .venv-libraries"
echo "$made_from" >.venv-libraries/.setup
