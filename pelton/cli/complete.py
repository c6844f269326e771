"""`pelton complete`: texts continued, in a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pelton.cli import dialogue
from pelton.cli.dialogue import SAMPLING_FIELDS, Dialogue, no_words, show
from pelton.cli.flags import Parser, given
from pelton.cli.generate import DEFAULT_MAX_TOKENS
from pelton.errors import RequestError

_PATH = "/v1/completions"


def make_parser() -> Parser:
    """The command's flags."""
    return dialogue.make_parser(
        "pelton complete",
        "Continues texts with a model: a server's, or one that is loaded for it. max_tokens is "
        f"{DEFAULT_MAX_TOKENS} unless given.",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    return dialogue.parse(make_parser(), argv)


def run(options: argparse.Namespace) -> int:
    """130 if it was left by Ctrl-C."""
    is_quick = options.quick is not None
    text = dialogue.read_quick(options.quick) if is_quick else ""
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **given(options, SAMPLING_FIELDS)}
    with dialogue.open_api(options, "complete") as api:
        stats = not is_quick if options.stats is None else options.stats
        completing = Completing(api, sampling, shows_stats=stats)
        if not is_quick:
            return completing.run()
        completing.ask(text)
        return 130 if completing.stopped else 0


class Completing(Dialogue):
    """last: the text that was continued last."""

    last = ""

    def ask(self, text: str) -> None:
        self.last = text
        body = {"prompt": text, **self.sampling}
        self.note(show(self.api.events(_PATH, body), _text))

    def do_retry(self, words: str) -> None:
        """/retry  another continuation of the last text"""
        no_words("retry", words)
        if not self.last:
            raise RequestError("there is nothing to try again.")
        self.ask(self.last)


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or ""
