"""The requests that have not ended, and the answers that each of them gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.answers import Answer, as_request_failure
from pelton.engine.outputs import RequestOutput
from pelton.errors import PeltonError, RequestError
from pelton.tokens.tokenizer import Tokenizer

_SEEDS = 2**64


@dataclasses.dataclass(slots=True)
class _Open:
    """answers: one per child, by index. has_joined: whether the engine knows all of them."""

    output: RequestOutput
    answers: list[Answer]
    has_joined: bool


class OpenRequests:
    """Each request, from `open` until all its answers have ended; then nothing of it is left here.

    A request for n answers becomes n requests of the engine, its children. Child 0 goes first,
    under the request's own id. The others join with its first token, when the prompt's full blocks
    are in the prefix cache, or when it has failed, and take the places behind it in the queue.

    Args:
        add: gives the engine a request; raises if it can never run.
        abort: ends one, by id.
    """

    def __init__(
        self,
        add: Callable[[Request], None],
        abort: Callable[[str], bool],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._add = add
        self._abort = abort
        self._tokenizer = tokenizer
        self._by_child: dict[str, tuple[_Open, Answer]] = {}

    def __len__(self) -> int:
        """Children of open requests."""
        return len(self._by_child)

    def open(self, request: Request, prompt: str | None) -> RequestOutput:
        """Give the engine a request, whose output is returned and kept up to date.

        Raises what is wrong with it, a RequestError mostly; nothing is left behind then.
        """
        children = [request, *(_sibling(request, index) for index in range(1, request.params.n))]
        answers = [
            Answer(child, self._tokenizer, index=index) for index, child in enumerate(children)
        ]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.known_token_ids.tolist(),
            outputs=[answer.completion for answer in answers],
        )
        for child in children:
            if child.request_id in self._by_child:
                raise RequestError(
                    f"request_id {child.request_id!r} is in use; choose another one.",
                    field="request_id",
                )
        # Noted first: whatever interrupts the hand-over, `abort_all` knows of it.
        opened = _Open(output, answers, has_joined=len(answers) == 1)
        for answer in answers:
            self._by_child[answer.request.request_id] = opened, answer
        try:
            self._add(request)
        except Exception:
            self._forget(opened)
            raise
        return output

    def take(self, update: RequestUpdate, rows: LogprobRows | None) -> RequestOutput | None:
        """Book what a step yielded for one child.

        Returns the request's output, changed, or None for an answer that has ended before.
        """
        child_id = update.request.request_id
        opened, answer = self._by_child.get(child_id, (None, None))
        if opened is None or answer is None or answer.is_finished:
            return None
        try:
            lives_on = answer.take(update, rows)
        except Exception as error:
            answer.fail(as_request_failure(child_id, error))
            lives_on = True
        if lives_on:
            self._abort(child_id)
        if not opened.has_joined:
            self._join(opened)
        self._settle(opened)
        return opened.output

    def abort(self, request_id: str) -> bool:
        """End all answers of a request; False if it has ended already."""
        opened, _ = self._by_child.get(request_id, (None, None))
        if opened is None:
            return False
        for answer in opened.answers:
            if not answer.is_finished:
                self._abort(answer.request.request_id)
                answer.finish("abort")
        self._settle(opened)
        return True

    def abort_all(self) -> None:
        while self._by_child:
            self.abort(next(iter(self._by_child)))

    def _join(self, opened: _Open) -> None:
        """The prompt is computed: let the siblings of child 0 into the engine."""
        opened.has_joined = True
        first, *others = opened.answers
        for index, answer in enumerate(others, 1):
            child = answer.request
            child.arrival = first.request.arrival + index
            try:
                self._add(child)
            except Exception as error:
                known = isinstance(error, PeltonError)
                answer.fail(error if known else as_request_failure(child.request_id, error))

    def _settle(self, opened: _Open) -> None:
        output, answers = opened.output, opened.answers
        output.prompt_logprobs = answers[0].prompt_logprobs
        output.num_cached_tokens = answers[0].request.num_cached_tokens
        if output.error is None:
            output.error = next((one.error for one in answers if one.error is not None), None)
        if all(answer.is_finished for answer in answers):
            output.finished = True
            self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        for answer in opened.answers:
            self._by_child.pop(answer.request.request_id, None)


def _sibling(request: Request, index: int) -> Request:
    """Child `index` of a request: the same prompt, other noise."""
    seed = request.params.seed
    if seed is not None:
        seed = (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return Request(
        f"{request.request_id}#{index}",
        request.known_token_ids,
        dataclasses.replace(request.params, n=1, seed=seed, prompt_logprobs=None),
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        prompt_embeds_digest=request.prompt_embeds_digest,
        eos_token_ids=request.eos_token_ids,
    )
