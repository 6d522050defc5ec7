"""Each wheel, built from this tree and installed in a clean environment without the other side's packages.

The training image must not get node-replacing code, and the service must not get torch. What the wheels need comes
from the folder of wheels that `make setup` fills, so that the test touches no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELHOUSE = ROOT / ".cache" / "wheelhouse"

#: Modules of sdcwatch that may import torch. Everything else, the agent first of all, runs where torch is absent.
NEEDS_TORCH = frozenset(
    f"sdcwatch.{name}"
    for name in (
        "audit",
        "checks.gradients",
        "checks.replay",
        "checks.weights",
        "contain",
        "environment",
        "exchange",
        "fingerprint",
        "monitor",
        "start",
    )
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
names = [package.__name__] + [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
wrong = []
for name in names:
    if name not in {skipped!r} and not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except Exception as error:
            wrong.append(f"{{name}}: {{error!r}}")
print(len(names))
sys.exit("\\n".join(wrong))
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


@pytest.fixture
def wheelhouse(request: pytest.FixtureRequest) -> Path:
    """The folder of wheels, or a skip that names it (a failure in CI)."""
    if not any(WHEELHOUSE.glob("*.whl")):
        message = f"{WHEELHOUSE.relative_to(ROOT)} is missing: run `make setup`"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return WHEELHOUSE


@pytest.mark.usefixtures("wheelhouse")
@pytest.mark.parametrize(
    ("project", "package", "command", "blocked", "skipped"),
    [
        ("exporter", "sdcwatch", "sdcwatch", TRAINING_SIDE_MUST_NOT_NAME, NEEDS_TORCH),
        ("remediation", "sdcwatch_remediation", "sdcwatch-remediation", SERVICE_SIDE_MUST_NOT_NAME, frozenset()),
    ],
    ids=["training side", "service side"],
)
def test_a_wheel_works_without_the_other_side(
    tmp_path: Path, project: str, package: str, command: str, blocked: tuple[str, ...], skipped: frozenset[str]
) -> None:
    """The wheel installs with its own dependencies only, its command starts, and every module but torch's imports."""
    wheel = build_wheel(project, tmp_path / "wheel")
    commands = clean_environment(tmp_path / "venv", wheel, blocked)
    assert "usage" in run(commands / command, "--help", cwd=tmp_path).lower()
    num_modules = int(run(commands / "python", "-c", SWEEP.format(package=package, skipped=skipped), cwd=tmp_path))
    assert num_modules > 10
    with pytest.raises(AssertionError, match="blocked here"):
        run(commands / "python", "-c", f"import {blocked[0]}", cwd=tmp_path)


@pytest.mark.parametrize(("project", "package"), [("exporter", "sdcwatch"), ("remediation", "sdcwatch_remediation")])
def test_a_wheel_holds_its_package_its_licence_and_its_types(tmp_path: Path, project: str, package: str) -> None:
    """A wheel carries one top-level package, the licence text and the `py.typed` marker: no test or demo in it."""
    names = zipfile.ZipFile(build_wheel(project, tmp_path)).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package}
    assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_torch_is_asked_for_by_nobody() -> None:
    """Neither distribution depends on torch: a hard requirement would replace the build in a vendor's image."""
    for project in ("exporter", "remediation"):
        text = (ROOT / project / "pyproject.toml").read_text(encoding="utf-8")
        assert '"torch' not in text
