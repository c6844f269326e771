"""Every exception that Pelton raises on purpose.

    PeltonError
    ├── ConfigError (ValueError)       the user asked for something impossible, before any request
    │   ├── CheckpointError            a model file is missing, truncated, corrupt or incomplete
    │   └── UnsupportedError           understood, and refused by name
    ├── RequestError (ValueError)      one request is wrong; it alone is hurt (HTTP 400)
    └── EngineError (RuntimeError)     our fault
        ├── RequestFailed              one request could not be finished (HTTP 500, retryable)
        ├── EngineBusy                 one request was turned away: too many wait (HTTP 503)
        ├── EngineDead                 the engine's process is gone (HTTP 503)
        ├── DeviceLost                 the device is gone: nothing can go on
        └── IntegrityError             an invariant of the engine is broken

Users' faults are `ValueError` kin and name the field, the value and the limit; `assert` is for
ours.
"""


class PeltonError(Exception):
    """Root of the tree."""


class ConfigError(PeltonError, ValueError):
    """The configuration cannot work. The message says what to change, with a number."""


class CheckpointError(ConfigError):
    """A model file is missing, truncated, corrupt or incomplete."""


class UnsupportedError(ConfigError):
    """Understood, and refused by name."""


class RequestError(PeltonError, ValueError):
    """A request is wrong.

    Args:
        message: one sentence with field, value and limit.
        field: name of the offending field, as the user types it, or None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineError(PeltonError, RuntimeError):
    """A fault of the engine."""


class RequestFailed(EngineError):
    """One request could not be finished; its neighbours are untouched."""


class EngineBusy(EngineError):
    """A request is turned away, because too many wait or the engine is shutting down.

    Args:
        message: one sentence.
        retry_after: seconds after which another attempt makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(EngineError):
    """The engine's process is gone.

    Args:
        message: one sentence.
        child_traceback: what the process itself said last, or "".
    """

    def __init__(self, message: str, *, child_traceback: str = "") -> None:
        super().__init__(message)
        self.child_traceback = child_traceback


class DeviceLost(EngineError):
    """The device no longer answers."""


class IntegrityError(EngineError):
    """An invariant of the engine is broken; a bug."""
