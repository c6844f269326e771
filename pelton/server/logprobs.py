"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from pelton.sampling.logprobs import Logprob
from pelton.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    PromptToken,
    TokenLogprob,
    TopLogprob,
)
from pelton.tokens.tokenizer import Tokenizer

_LEAST = -9999.0
"""JSON has no -inf, which is what a masked token has. OpenAI's documentation uses this number."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def top_entries(entries: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely of a token's possibilities, best first. (The token itself is always
    among the possibilities, and is dropped here if it is less likely than these.)"""
    return sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]


def chat_logprobs(
    ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    num_top: int,
    tokenizer: Tokenizer,
) -> ChatLogprobs:
    """Tokens of a message, with the real bytes of each.

    ids, entries: [num_tokens], and the possibilities for each.
    """
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=tokenizer.token_text(token),
                logprob=finite(possible[token].logprob),
                bytes=list(tokenizer.token_bytes(token)),
                top_logprobs=[
                    TopLogprob(
                        token=tokenizer.token_text(top),
                        logprob=finite(one.logprob),
                        bytes=list(tokenizer.token_bytes(top)),
                    )
                    for top, one in top_entries(possible, num_top)
                ],
            )
            for token, possible in zip(ids, entries, strict=True)
        ]
    )


def _key(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or for one that is no whole characters its bytes, as OpenAI writes them:
    as keys, replacement characters would all be one."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionTokens:
    """Tokens of one text with their offsets, as they come.

    An offset is the number of characters of the text before that of the token's first byte; so the
    tokens of one character share its offset, and tokens without text take no characters.

    Args:
        num_top: alternatives that were asked for.
        hidden: tokens that give no text.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden = hidden
        self._offset = 0
        self._decoder = _new_decoder("replace")

    def prompt(
        self, text: str, ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None]
    ) -> CompletionLogprobs:
        """The text begins with `text`, whose tokens are `ids`. A token that is not found in the
        text, such as one that the tokenizer adds, takes no characters."""
        answer = self._new()
        raw, place = text.encode(), 0
        for token, entry in zip(ids, entries, strict=True):
            piece = self._tokenizer.token_bytes(token)
            if not raw.startswith(piece, place):
                piece = piece.removeprefix(b" ")  # what SentencePiece puts before a text
            piece = piece if raw.startswith(piece, place) else b""
            place += len(piece)
            self._add(answer, token, entry, piece)
        self._offset = len(text)
        self._decoder.reset()
        return answer

    def output(
        self, ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]
    ) -> CompletionLogprobs:
        """More tokens of the answer."""
        answer = self._new()
        for token, entry in zip(ids, entries, strict=True):
            piece = b"" if token in self._hidden else self._tokenizer.token_bytes(token)
            self._add(answer, token, entry, piece)
        return answer

    def _new(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[],
            token_logprobs=[],
            top_logprobs=[] if self._num_top else None,
            text_offset=[],
        )

    def _add(
        self,
        answer: CompletionLogprobs,
        token: int,
        entry: Mapping[int, Logprob] | None,
        piece: bytes,
    ) -> None:
        answer.tokens.append(_key(self._tokenizer, token))
        answer.token_logprobs.append(None if entry is None else finite(entry[token].logprob))
        answer.text_offset.append(self._take(piece))
        if answer.top_logprobs is not None:
            answer.top_logprobs.append(None if entry is None else self._top(token, entry))

    def _take(self, piece: bytes) -> int:
        """The offset of a token with the bytes `piece`."""
        begun = len(self._decoder.getstate()[0])
        text = self._decoder.decode(piece[:1])
        goes_on = len(self._decoder.getstate()[0]) > begun or len(text) == 1
        # Else what was begun is no character, and a replacement for it stands before this one.
        offset = self._offset + (begun > 0 and bool(piece) and not goes_on)
        self._offset += len(text) + len(self._decoder.decode(piece[1:]))
        return offset

    def _top(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """The most likely ones and the token itself: one more than asked for, at most."""
        found = {_key(self._tokenizer, token): finite(entry[token].logprob)}
        for other, one in top_entries(entry, self._num_top):
            found.setdefault(_key(self._tokenizer, other), finite(one.logprob))
        return found


def join_completion_logprobs(whole: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Adds a chunk's tokens to those before."""
    whole.tokens += more.tokens
    whole.token_logprobs += more.token_logprobs
    whole.text_offset += more.text_offset
    if whole.top_logprobs is not None and more.top_logprobs is not None:
        whole.top_logprobs += more.top_logprobs


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None], ids: Sequence[int], num_top: int
) -> PromptLogprobs:
    """Per token of the prompt: token id -> its log-probability; keys are strings, as in JSON."""
    return [
        None
        if entry is None
        else {
            str(possible): PromptToken(
                logprob=finite(one.logprob), rank=one.rank, decoded_token=one.decoded_token
            )
            for possible, one in {
                token: entry[token],
                **dict(top_entries(entry, num_top)),
            }.items()
        }
        for token, entry in zip(ids, entries, strict=True)
    ]
