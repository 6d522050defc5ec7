"""Every exception that sdcwatch raises on purpose.

SdcwatchError (RuntimeError)
├── ConfigurationError     a setting, model or place that cannot work; raised at start, says what to do
├── SpoolError             the spool cannot be written or is owned by somebody else
├── IdentityError          sources that name this node contradict each other
├── CheckpointError        a checkpoint that must not be loaded
└── CorruptionDetected     on_fault="halt": raised out of backward() on every rank
"""

from __future__ import annotations

#: Exit status of a training process that stopped because of a proven corruption (see docs/contracts.md).
EXIT_HALTED = 86


class SdcwatchError(RuntimeError):
    """Base of all errors of this package."""


class ConfigurationError(SdcwatchError, ValueError):
    """A setting, model or place that cannot work. The message says what to change."""


class SpoolError(SdcwatchError):
    """The spool folder cannot be used (permissions, owner, symlink, quota)."""


class IdentityError(SdcwatchError):
    """Two sources name this node differently; the message lists the sources."""


class CheckpointError(SdcwatchError):
    """A checkpoint is torn, corrupt or tainted and must not be loaded."""


class CorruptionDetected(SdcwatchError):
    """A verdict proved that the state of the replicas differs and `on_fault` asked to stop.

    Attributes:
        event_id: id of the durable event (`sdc-` and 16 hex digits).
        step: training step whose exchange showed the fault.
    """

    def __init__(self, message: str, *, event_id: str, step: int) -> None:
        super().__init__(message)
        self.event_id = event_id
        self.step = step
