"""The requests of a pooling engine that have not ended. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.outputs import PoolingOutput, PoolingRequestOutput
from pelton.errors import RequestError


class PooledRequests:
    """Each request, from `open` to its end; then nothing of it is left here.

    Args:
        add: gives the engine a request; raises if it can never run.
        abort: ends one, by id.
    """

    def __init__(self, add: Callable[[Request], None], abort: Callable[[str], bool]) -> None:
        self._add = add
        self._abort = abort
        self._open: dict[str, PoolingRequestOutput[PoolingOutput]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request, prompt: str | None) -> PoolingRequestOutput[PoolingOutput]:
        """Give the engine a request, whose output is returned and filled at its end.

        Raises what is wrong with it, a RequestError mostly; nothing is left behind then.
        """
        if request.request_id in self._open:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; choose another one.",
                field="request_id",
            )
        output: PoolingRequestOutput[PoolingOutput] = PoolingRequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
        )
        # Noted first: whatever interrupts the hand-over, `abort_all` knows of it.
        self._open[request.request_id] = output
        try:
            self._add(request)
        except Exception:
            del self._open[request.request_id]
            raise
        return output

    def take(
        self, updates: Iterable[tuple[RequestUpdate, LogprobRows | None]]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Book what a step yielded. Returns the outputs that are finished now."""
        finished = []
        for update, _ in updates:
            output = self._open.pop(update.request.request_id, None)
            if output is None:
                continue
            if update.pooled is not None:
                output.outputs = PoolingOutput(update.pooled)
            output.error = update.error
            output.num_cached_tokens = update.request.num_cached_tokens
            output.finished = True
            finished.append(output)
        return finished

    def abort_all(self) -> None:
        while self._open:
            request_id, _ = self._open.popitem()
            self._abort(request_id)


def failed_pooling(
    request_id: str, prompt: str | None, error: Exception
) -> PoolingRequestOutput[PoolingOutput]:
    """The output of a request that never got into the engine."""
    return PoolingRequestOutput(
        request_id=request_id, prompt=prompt, prompt_token_ids=[], finished=True, error=error
    )
