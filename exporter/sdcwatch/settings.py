"""One frozen record of settings and the only reader of `SDCWATCH_*`.

Precedence, written once: argument > environment > file > default. The file is `sdcwatch.toml` in the working folder,
or what `SDCWATCH_CONFIG` names. Unknown keys are errors in all three places. Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcwatch.errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "SDCWATCH_"
#: Variables with our prefix that are no settings: where the file is, the off switch, and fault injection's own.
RESERVED = frozenset({"SDCWATCH_CONFIG", "SDCWATCH_DISABLE"})
RESERVED_PREFIX = "SDCWATCH_TESTING_"
#: What Kubernetes puts into every pod for a Service called sdcwatch or sdcwatch-...: not ours, although it looks so.
_SERVICE_NAME = re.compile(r".*_(SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://.*")

_CHOICES = {
    "on_fault": ("observe", "halt", "heal"),
    "agent": ("auto", "external", "off"),
    "evidence_data": ("none", "batch", "weights"),
}
_AT_LEAST = {
    "check_every": 1,
    "conservation_every": 0,
    "replay_every": 0,
    "heal_window": 0,
    "halt_grace_scrapes": 0,
    "halt_grace_seconds": 0,
    "metrics_interval": 0,
    "max_overhead": 0,
    "agent_port": 1,
    "verdicts_kept": 1,
    "spool_quota_mb": 1,
    "evidence_mb": 0,
}
_AT_MOST = {"agent_port": 65535, "max_overhead": 1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a `Monitor`. Each is also an environment variable: `replay_every` is `SDCWATCH_REPLAY_EVERY`.

    Attributes:
        job: name of this training job; no two running jobs may share it. Default: Slurm's or torchrun's own.
        cluster: HyperPod cluster name; empty outside one.
        node: EKS node name or Slurm NodeName. Default: the agent's `node.json`, Slurm's, else the host name.
        instance: instance id (`i-...`); empty outside a cloud.
        gpu_uuid: overrides the device's own UUID (for CPU runs and tests).
        spool_dir: root of this node's spool.
        checkpoint_dir: where checkpoints and the latch live; shared by all nodes. None: no latch outside the spool.
        on_fault: `observe` reports; `halt` raises out of `backward()` on a proven difference of state; `heal` undoes it
            inside `backward()` where that is sound, and halts where it is not (docs/healing.md).
        heal_window: with `heal`, a second event that may be of the same node halts when it comes within this many
            reducing backwards of the first.
        check_every: gradient and weight checks run on every n-th reducing backward.
        conservation_every: the reduced gradient is held against the average of the local ones on every n-th reducing
            backward, the first included; 0 turns it off. It costs several fingerprints, so it does not run on each.
        replay_every: replay audits run on every n-th reducing backward, the first included; 0 turns replay off.
        max_overhead: most time that all checks together may take, as a share of training without them. Where they take
            more, their cadences are stretched, the same on all ranks: replay first, then conservation, then all others;
            `sdc_check_every` says how far. 0 turns it off: then the cadences above hold, whatever they cost.
        halt_grace_scrapes: scrapes that a halting rank waits for where the agent dies with the job.
        halt_grace_seconds: the most seconds of that wait.
        metrics_interval: seconds between two writes of this rank's metrics file.
        agent: `auto` starts the node agent when none runs, `external` expects a service, `off` starts none.
        agent_host, agent_port: where an agent started by a rank listens.
        events_token_file, latch_token_file: token files handed to an agent started by a rank.
        verdicts_kept: length of `monitor.verdicts`.
        spool_quota_mb: most megabytes of spool for this job on this node.
        evidence_data: what of the training data an evidence file may hold: `none` (fingerprints, shapes, random state
            and environment only), `batch` (the micro-batch, too) or `weights` (the model as it was, too).
        evidence_mb: most megabytes of one evidence file; what does not fit is left out and named. 0: none is written.
    """

    job: str | None = None
    cluster: str = ""
    node: str | None = None
    instance: str | None = None
    gpu_uuid: str | None = None
    spool_dir: str = "/tmp/sdcwatch"
    checkpoint_dir: str | None = None
    on_fault: str = "observe"
    heal_window: int = 1000
    check_every: int = 1
    conservation_every: int = 10
    replay_every: int = 200
    max_overhead: float = 0.02
    halt_grace_scrapes: int = 3
    halt_grace_seconds: float = 120.0
    metrics_interval: float = 1.0
    agent: str = "auto"
    agent_host: str = "127.0.0.1"
    agent_port: int = 9478
    events_token_file: str | None = None
    latch_token_file: str | None = None
    verdicts_kept: int = 1000
    spool_quota_mb: int = 256
    evidence_data: str = "none"
    evidence_mb: int = 64

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigurationError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be at least {least}")
        for name, most in _AT_MOST.items():
            if getattr(self, name) > most:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be at most {most}")
        if not self.spool_dir:
            raise ConfigurationError("spool_dir is empty; name a folder, or leave it out for the default")

    def cadence(self, every: int, checks: int | None = None) -> int:
        """The number of reducing backwards between two runs of a check that is to run on every `every`-th.

        It is judged together with the gradient and weight checks, so it is rounded up to a multiple of `checks`
        (default: `check_every`); 0 stays 0: off.
        """
        checks = checks or self.check_every
        return -(-every // checks) * checks

    @classmethod
    def load(cls, arguments: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Merges arguments, environment and file.

        Args:
            arguments: what the caller passed; None values count as not passed.
            environ: the environment to read (default: `os.environ`).

        Raises:
            ConfigurationError: an unknown key or a value that cannot be read, naming where it came from.
        """
        environ = os.environ if environ is None else environ
        merged: dict[str, Any] = {}
        merged.update(_from_file(environ))
        merged.update(_from_environment(environ))
        for key, value in (arguments or {}).items():
            _known(key, "argument")
            if value is not None:
                merged[key] = _typed(key, os.fspath(value) if isinstance(value, os.PathLike) else value, "argument")
        return cls(**merged)


_TYPES = {f.name: str(f.type) for f in dataclasses.fields(Settings)}


def disabled(environ: Mapping[str, str] | None = None) -> bool:
    """True when `SDCWATCH_DISABLE` asks to turn everything off without a code change."""
    value = (os.environ if environ is None else environ).get("SDCWATCH_DISABLE", "")
    return value.strip().lower() in {"1", "true", "yes", "on"}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED or variable.startswith(RESERVED_PREFIX):
            continue
        if _SERVICE_NAME.fullmatch(variable) or _SERVICE_VALUE.fullmatch(value):
            continue
        key = variable[len(PREFIX) :].lower()
        if variable != PREFIX + key.upper():
            raise ConfigurationError(f"environment variable {variable} is not in capitals; write {PREFIX}{key.upper()}")
        found[key] = _typed(key, value, f"environment variable {variable}", spelled=lambda name: PREFIX + name.upper())
    return found


def _from_file(environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get("SDCWATCH_CONFIG")
    path = Path(named or "sdcwatch.toml")
    if not path.is_file():
        if named:
            raise ConfigurationError(f"SDCWATCH_CONFIG names {named}, which is no file")
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from error
    return {key: _typed(key, value, f"file {path}") for key, value in content.items()}


def _known(key: str, source: str, spelled: Callable[[str], str] = str) -> None:
    if key not in _TYPES:
        near = difflib.get_close_matches(key, _TYPES, n=1)
        hint = f"; did you mean {spelled(near[0])}?" if near else ""
        raise ConfigurationError(f"unknown setting {key!r} ({source}){hint}")


def _typed(key: str, value: Any, source: str, *, spelled: Callable[[str], str] = str) -> Any:
    _known(key, source, spelled)
    wanted = _TYPES[key]
    try:
        if wanted.startswith("int"):
            if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            return int(value)
        if wanted.startswith("float"):
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if wanted.startswith("int") else "a number"
        raise ConfigurationError(f"{key} is {value!r} ({source}); it must be {what}") from None
    if not isinstance(value, str):
        raise ConfigurationError(f"{key} is {value!r} ({source}); it must be text")
    return value
