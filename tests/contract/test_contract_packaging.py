"""Each wheel, built from this tree and installed in a clean environment without the other side's packages.

The training image must not get node-replacing code, and the service must not get torch. What the wheels need comes
from the folder of wheels that `make setup` fills, so that the test touches no network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sdcwatch.cli import COMMANDS

#: Two virtual environments and their packages: mostly the disk's time, which a busy machine stretches.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
WHEELHOUSE = ROOT / ".cache" / "wheelhouse"

#: What runs where torch is absent: the agent, whatever a command starts with, and the plain words. The rest of the
#: training side may miss torch, and nothing else.
WITHOUT_TORCH = (
    "agent",
    "catalog",
    "checkpoints.manifest",
    "cli",
    "durable",
    "errors",
    "event",
    "exposition",
    "identity",
    "latch",
    "metrics",
    "observation",
    "preflight",
    "launch",
    "settings",
    "spool",
    "spool.rank",
    "spool.reader",
    "verdict",
    *(module.removeprefix("sdcwatch.") for module, _ in COMMANDS.values()),
)

TRAINING_SIDE_MUST_NOT_NAME = (
    "boto3",
    "botocore",
    "fastapi",
    "httpx",
    "sdcwatch_remediation",
    "sqlalchemy",
    "starlette",
    "torch",
    "uvicorn",
)
SERVICE_SIDE_MUST_NOT_NAME = ("sdcwatch", "torch", "xxhash", "numpy")

#: Python reads sitecustomize first: a blocked name fails there with its own error, wherever it might be installed.
BLOCKER = """
import sys
class _Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked here: it belongs to the other side", name=name)
sys.meta_path.insert(0, _Blocked())
"""

SWEEP = """
import importlib, pkgutil, sys
import {package} as package
found = {{}}
walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None)
for name in [package.__name__, *(module.name for module in walk)]:
    if name.endswith("__main__") or ".migrations." in name:  # Alembic runs those itself, inside a migration
        continue
    try:
        importlib.import_module(name)
        found[name] = ""
    except ModuleNotFoundError as error:
        found[name] = error.name
for name, missing in found.items():
    print(name, missing)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=100,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def build_wheel(project: str, into: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", into, ROOT / project)
    (wheel,) = into.glob("*.whl")
    return wheel


def clean_environment(folder: Path, wheel: Path, blocked: tuple[str, ...]) -> Path:
    """A new virtual environment with `wheel` and what it needs; `blocked` cannot be imported. Gives its bin folder."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "-qq"),
        *("--no-index", "--find-links", WHEELHOUSE, "--no-compile", wheel),
    )
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked), encoding="utf-8")
    return folder / "bin"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, built from this tree, by project folder."""
    return {project: build_wheel(project, tmp_path_factory.mktemp(project)) for project in ("exporter", "remediation")}


@pytest.fixture
def wheelhouse() -> Path:
    """The folder of wheels, or a skip that names it (a failure in CI)."""
    if not any(WHEELHOUSE.glob("*.whl")):
        message = f"{WHEELHOUSE.relative_to(ROOT)} is missing: run `make setup`"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return WHEELHOUSE


def missing_imports(commands: Path, package: str) -> dict[str, str]:
    """Every module of the installed package, and what its import missed (empty: it imports)."""
    lines = run(commands / "python", "-c", SWEEP.format(package=package), cwd=commands).splitlines()
    return {module: missing for module, _, missing in (line.partition(" ") for line in lines)}


@pytest.mark.usefixtures("wheelhouse")
def test_the_training_wheel_needs_neither_the_service_nor_torch_beyond_the_loop(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    """It installs, starts and imports without the service's packages; only the training loop's modules miss torch."""
    commands = clean_environment(tmp_path / "venv", wheels["exporter"], TRAINING_SIDE_MUST_NOT_NAME)
    assert "usage: sdcwatch" in run(commands / "sdcwatch", "--help", cwd=tmp_path)
    for command in COMMANDS:
        assert f"sdcwatch {command}" in run(commands / "sdcwatch", command, "--help", cwd=tmp_path)
    missing = missing_imports(commands, "sdcwatch")
    assert set(missing.values()) <= {"", "torch"}
    plain = re.compile(rf"sdcwatch\.({'|'.join(map(re.escape, WITHOUT_TORCH))})(\..*)?")
    assert {module for module in missing if plain.fullmatch(module)} >= {f"sdcwatch.{name}" for name in WITHOUT_TORCH}
    assert not {module for module, name in missing.items() if name and plain.fullmatch(module)}
    with pytest.raises(AssertionError, match="blocked here"):
        run(commands / "python", "-c", "import boto3", cwd=tmp_path)


@pytest.mark.usefixtures("wheelhouse")
def test_the_service_wheel_needs_nothing_of_the_training_side(tmp_path: Path, wheels: dict[str, Path]) -> None:
    """It installs, starts and imports every module of its own without torch and without sdcwatch."""
    commands = clean_environment(tmp_path / "venv", wheels["remediation"], SERVICE_SIDE_MUST_NOT_NAME)
    assert "usage: sdcwatch-remediation" in run(commands / "sdcwatch-remediation", "--help", cwd=tmp_path)
    missing = missing_imports(commands, "sdcwatch_remediation")
    assert len(missing) > 10
    assert set(missing.values()) == {""}
    with pytest.raises(AssertionError, match="blocked here"):
        run(commands / "python", "-c", "import sdcwatch", cwd=tmp_path)


@pytest.mark.parametrize(("project", "package"), [("exporter", "sdcwatch"), ("remediation", "sdcwatch_remediation")])
def test_a_wheel_holds_its_package_its_licence_and_its_types(
    wheels: dict[str, Path], project: str, package: str
) -> None:
    """A wheel carries one top-level package, the licence text and the `py.typed` marker: no test or demo in it."""
    names = zipfile.ZipFile(wheels[project]).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package}
    assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_torch_is_asked_for_by_nobody() -> None:
    """Neither distribution depends on torch: a hard requirement would replace the build in a vendor's image."""
    for project in ("exporter", "remediation"):
        text = (ROOT / project / "pyproject.toml").read_text(encoding="utf-8")
        assert '"torch' not in text
