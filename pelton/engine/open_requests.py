"""The requests that have not ended, and the answers that each of them gets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.answers import Answer, as_request_failure
from pelton.engine.outputs import AnswerDelta, RequestOutput
from pelton.engine.siblings import Siblings, children_of
from pelton.errors import RequestError
from pelton.tokens.tokenizer import Tokenizer

_MAX_HELD = 32
"""Tokens of an answer that are made into text at once."""


@dataclasses.dataclass(slots=True)
class _Open:
    """children, answers: by index."""

    output: RequestOutput
    children: list[Request]
    answers: list[Answer]


@dataclasses.dataclass(slots=True)
class _Child:
    """held: tokens that the output does not show yet. They are shown when there are max_held."""

    opened: _Open
    answer: Answer
    held: list[int] = dataclasses.field(default_factory=list)
    max_held: int = 0


class OpenRequests:
    """Each request, from `open` until all its answers have ended; then nothing of it is left here.

    Nobody sees an output before it has ended. So tokens that no stop string waits for, and that
    have no log-probabilities, are only noted, and become text some at a time.

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
        self._siblings = Siblings(lambda request: self._add(request))
        self._by_child: dict[str, _Child] = {}
        # Answers that begin together do not all become text in one step.
        self._first_held = itertools.cycle(range(1, _MAX_HELD + 1))

    def __len__(self) -> int:
        """Children of open requests."""
        return len(self._by_child)

    def open(self, request: Request, prompt: str | None) -> RequestOutput:
        """Give the engine a request, whose output is returned and filled as tokens come.

        Raises what is wrong with it, a RequestError mostly; nothing is left behind then.
        """
        children = children_of(request)
        answers = [
            Answer(child, self._tokenizer, index=index) for index, child in enumerate(children)
        ]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[answer.completion() for answer in answers],
        )
        for child in children:
            if child.request_id in self._by_child:
                raise RequestError(
                    f"request_id {child.request_id!r} is in use; choose another one.",
                    field="request_id",
                )
        # Noted first: whatever interrupts the hand-over, `abort_all` knows of it.
        opened = _Open(output, children, answers)
        for child, answer in zip(children, answers):
            self._by_child[child.request_id] = _Child(opened, answer)
        try:
            self._siblings.add(children)
        except Exception:
            self._forget(opened)
            raise
        return output

    def take(
        self, updates: Iterable[tuple[RequestUpdate, LogprobRows | None]]
    ) -> list[RequestOutput]:
        """Book what a step yielded. Returns the outputs that are finished now."""
        finished = []
        by_child = self._by_child
        for update, rows in updates:
            child = by_child.get(update.request.request_id)
            if child is None or child.answer.is_finished:
                continue
            held = child.held
            held += update.new_token_ids
            if len(held) >= child.max_held or update.finish_reason is not None:
                self._show(child, update, rows)
                if child.opened.output.finished:
                    finished.append(child.opened.output)
        return finished

    def _show(self, child: _Child, update: RequestUpdate, rows: LogprobRows | None) -> None:
        """Make what is held part of the output."""
        child_id, opened, answer = update.request.request_id, child.opened, child.answer
        update.new_token_ids, child.held = child.held, []
        if not answer.needs_every_step:
            child.max_held = _MAX_HELD if child.max_held else next(self._first_held)
        try:
            delta = answer.take(update, rows)
        except Exception as error:
            delta = answer.fail(as_request_failure(child_id, error))
        self._book(opened, delta)
        if delta.finish_reason is not None and update.finish_reason is None:
            self._abort(child_id)
        if len(opened.children) > 1 and answer.index == 0:
            for sibling, fault in self._siblings.join(opened.children[0]):
                self._book(opened, self._by_child[sibling.request_id].answer.fail(fault))
        self._settle(opened)

    def abort(self, request_id: str) -> bool:
        """End all answers of a request; False if it has ended already."""
        found = self._by_child.get(request_id)
        if found is None:
            return False
        opened = found.opened
        self._siblings.forget(opened.output.request_id)
        for request, answer in zip(opened.children, opened.answers):
            if not answer.is_finished:
                self._abort(request.request_id)
                held = self._by_child[request.request_id].held
                if held:
                    self._book(opened, answer.take(RequestUpdate(request, held, 0, 0, None), None))
                self._book(opened, answer.abort())
        self._settle(opened)
        return True

    def abort_all(self) -> None:
        while self._by_child:
            self.abort(next(iter(self._by_child)))

    def _book(self, opened: _Open, delta: AnswerDelta) -> None:
        opened.output.outputs[delta.index].add(delta)
        if delta.error is not None and opened.output.error is None:
            opened.output.error = delta.error

    def _settle(self, opened: _Open) -> None:
        output, answers = opened.output, opened.answers
        output.prompt_logprobs = answers[0].prompt_logprobs
        output.num_cached_tokens = opened.children[0].num_cached_tokens
        if answers[-1].is_finished and all(answer.is_finished for answer in answers):
            output.finished = True
            self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        for child in opened.children:
            self._by_child.pop(child.request_id, None)
