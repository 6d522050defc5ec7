"""Errors of the service; each message says what to do next.

    RemediationError
    ├── ConfigError         the configuration cannot be used; the command exits 2
    ├── NotAlertmanager     a body that is not Alertmanager's; answered 400
    ├── StoreUnavailable    the database cannot take or give anything now; answered 503
    ├── Conflict            somebody else moved the case first, or the move is not allowed; answered 409
    └── ServiceError        the command line could not reach or use the running service; exits 1

Its place: raised by every module of the service, shown by `app` and `cli`.
"""

from __future__ import annotations


class RemediationError(Exception):
    """Base of the errors that this package raises on purpose."""


class ConfigError(RemediationError):
    """The configuration is wrong; the message names the key and what it may be."""


class NotAlertmanager(RemediationError):
    """The body is not an Alertmanager webhook at all."""


class StoreUnavailable(RemediationError):
    """The database is locked, full, read-only or gone; the sender should try again."""


class Conflict(RemediationError):
    """The case is not (or no longer) in a state that allows this."""


class ServiceError(RemediationError):
    """The running service did not answer, or answered with an error."""
