"""What a client is told when a request fails: OpenAI's shape, and the status that fits.

400  the request is wrong         401  no valid API key       404  no such model or path
413  the body is too large        503  try again later        500  a fault of the engine's
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec

from pelton.errors import EngineBusy, EngineDead, EngineError, RequestError

log = logging.getLogger("pelton.server")

_TYPES = {401: "authentication_error", 500: "server_error", 503: "service_unavailable_error"}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """message: a sentence for people. type: a kind for programs. param: the field that is wrong,
    where one is. code: a finer kind, where OpenAI has a name for it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the last event of a stream that fails."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is not a success.

    Args:
        status: HTTP status.
        message: one sentence with field, value and limit.
        param: the field that is wrong, as the client spells it.
        code: OpenAI's name of the case, or None.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def answer(self) -> ErrorAnswer:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorAnswer(
            ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        )


def unavailable(message: str, *, retry_after: float = 1.0) -> ApiError:
    """503: nothing is wrong with the request; another moment or another server may take it.
    retry_after: seconds after which another attempt makes sense."""
    return ApiError(503, message, headers={"Retry-After": str(math.ceil(retry_after))})


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """What the client is told of `error`. A fault of ours is logged with its traceback; its words
    stay here, for they may hold another client's data or a path of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, EngineBusy):
        return unavailable(str(error), retry_after=error.retry_after)
    if isinstance(error, EngineDead):
        return unavailable("The engine has stopped.")
    if isinstance(error, EngineError):
        log.error("request %s failed: %s", request_id, error)
        return ApiError(500, str(error))
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"The server failed on request {request_id}; its log says why.")
