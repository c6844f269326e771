"""`pelton chat`: a conversation with a model, in a terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelton.cli import dialogue
from pelton.cli.api import Api
from pelton.cli.dialogue import (
    SAMPLING_FIELDS,
    Dialogue,
    Shown,
    checked_text,
    no_words,
    show,
    tell,
)
from pelton.cli.flags import Parser, given
from pelton.cli.generate import check_can_chat
from pelton.config.reasons import reason_of
from pelton.errors import RequestError

_PATH = "/v1/chat/completions"


def make_parser() -> Parser:
    """The command's flags."""
    parser = dialogue.make_parser(
        "pelton chat", "Talks to a model: a server's, or one that is loaded for it."
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model shall behave")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    return dialogue.parse(make_parser(), argv)


def run(options: argparse.Namespace) -> int:
    """130 if it was left by Ctrl-C."""
    is_quick = options.quick is not None
    text = dialogue.read_quick(options.quick) if is_quick else ""
    if options.url is None:
        check_can_chat(dialogue.engine_args(options))
    with dialogue.open_api(options, "chat") as api:
        stats = not is_quick if options.stats is None else options.stats
        chat = Chat(api, given(options, SAMPLING_FIELDS), options.system_prompt, shows_stats=stats)
        if not is_quick:
            return chat.run()
        chat.ask(text)
        return 130 if chat.stopped else 0


class Chat(Dialogue):
    """messages: the conversation, with the system's first if there is one."""

    def __init__(
        self, api: Api, sampling: dict[str, Any], system: str | None, *, shows_stats: bool
    ) -> None:
        super().__init__(api, sampling, shows_stats=shows_stats)
        self.messages: list[dict[str, str]] = []
        if system:
            self.do_system(checked_text("--system-prompt", system))

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            shown = self._show()
        except BaseException:
            # What got no answer is not part of the conversation.
            self.messages.pop()
            raise
        if shown.text:
            self.messages.append({"role": "assistant", "content": shown.text})
        else:
            self.messages.pop()
        self.note(shown)

    def _show(self) -> Shown:
        body = {"messages": self.messages, **self.sampling}
        return show(self.api.events(_PATH, body), _content)

    def do_clear(self, words: str) -> None:
        """/clear  forget the conversation, but for the system prompt"""
        no_words("clear", words)
        self.messages = [m for m in self.messages if m["role"] == "system"]
        tell("[cleared]")

    def do_system(self, words: str) -> None:
        """/system TEXT  another system prompt, without text: none; the conversation goes on"""
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if words:
            self.messages.insert(0, {"role": "system", "content": words})

    def do_retry(self, words: str) -> None:
        """/retry  another answer to the last message"""
        no_words("retry", words)
        before = list(self.messages)
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages = before
            raise RequestError("there is nothing to try again.")
        try:
            self.ask(self.messages.pop()["content"])
        except BaseException:
            self.messages = before
            raise

    def do_save(self, words: str) -> None:
        """/save FILE  the conversation as JSON: model, messages and sampling"""
        if not words:
            raise RequestError("/save needs a file.")
        saved = {"model": self.api.model, "messages": self.messages, "sampling": self.sampling}
        try:
            with Path(words).expanduser().open("x", encoding="utf-8") as file:
                json.dump(saved, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except OSError as error:
            raise RequestError(f"{words} cannot be written: {reason_of(error)}.") from None
        tell(f"[written to {words}]")


def _content(choice: dict[str, Any]) -> str:
    return choice.get("delta", {}).get("content") or ""
