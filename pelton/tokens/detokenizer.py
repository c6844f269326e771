"""Text of an answer as its tokens arrive."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from pelton.tokens.stop_strings import StopMatcher
from pelton.tokens.tokenizer import TokenIds, Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6  # of the prompt; enough for any decoder's rule about the start of a text
_MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, one token each at worst

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _Stream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Turns the tokens of one answer into text, piece by piece.

    The pieces joined equal the one-shot decode of all output ids, as it stands after the prompt:
    a space that a decoder drops only at the start of a text is kept, and a character that the
    prompt's last token began and the answer finishes is given whole. Only whole characters come
    out. Bytes that might still become a character are held back; bytes that can not become one
    give U+FFFD as soon as that is certain, at the latest on `finish`. Never raises: ids outside
    the vocabulary give no text. Constant work per token, on average.

    Args:
        tokenizer: where the tokens come from.
        prompt_ids: the prompt, of which only the end is read.
        skip_special_tokens: special tokens give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | TokenIds,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        end = _as_list(prompt_ids[-_CONTEXT_TOKENS:])
        stream = _ByteStream if tokenizer.is_byte_level else _WindowStream
        self._stream: _Stream = stream(tokenizer, end, skip_special_tokens)
        self.push_list = self._stream.push
        """`push` of a list."""

    def push(self, ids: Sequence[int] | TokenIds) -> str:
        """Take more output ids; returns the text that became certain, possibly ""."""
        return self._stream.push(_as_list(ids))

    def finish(self) -> str:
        """No more ids will come: returns what was held back."""
        return self._stream.finish()


def _as_list(ids: Sequence[int] | TokenIds) -> Sequence[int]:
    # Python ints are several times quicker to look up than NumPy's.
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


class _WholeTexts(dict[int, str | None]):
    """Token id -> its text, or None where its bytes are no whole characters; made on demand."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._pieces[token].decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


_TEXTS: WeakKeyDictionary[Tokenizer, dict[bool, _WholeTexts]] = WeakKeyDictionary()


def _whole_texts(tokenizer: Tokenizer, skip_special_tokens: bool) -> _WholeTexts:
    """One for all answers."""
    of_tokenizer = _TEXTS.setdefault(tokenizer, {})
    if skip_special_tokens not in of_tokenizer:
        pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        of_tokenizer[skip_special_tokens] = _WholeTexts(pieces)
    return of_tokenizer[skip_special_tokens]


class _ByteStream:
    """Exact path for byte-level tokens: their bytes through an incremental UTF-8 decoder."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._texts = _whole_texts(tokenizer, skip_special_tokens)
        self._decoder = _new_utf8_decoder("replace")
        # The prompt's own bytes show whatever a user writes, so special tokens count there.
        every = tokenizer.pieces(skip_special_tokens=False)
        self._decoder.decode(b"".join([every[token] for token in context]))
        self._prompt_holds_half = self._holds_half = bool(self._decoder.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        if not self._holds_half and len(ids) == 1:
            whole = self._texts[ids[0]]
            if whole is not None:
                return whole
        text = self._decoder.decode(b"".join([self._pieces[token] for token in ids]))
        self._holds_half = bool(self._decoder.getstate()[0])
        return self._without_prompt(text) if self._prompt_holds_half else text

    def finish(self) -> str:
        text = self._decoder.decode(b"", True)
        return self._without_prompt(text) if self._prompt_holds_half else text

    def _without_prompt(self, text: str) -> str:
        """The half character at the prompt's end, if it stays broken, is not the answer's."""
        if not text:
            return text
        self._prompt_holds_half = False
        return text.removeprefix(_REPLACEMENT)


class _WindowStream:
    """For decoders that look at neighbours: decode a short window twice and take the difference.

    `_window[:_num_read]` are tokens whose text is out already; they only give context.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = [token for token in context if self._counts(token)]
        self._num_read = len(self._window)

    def _counts(self, token: int) -> bool:
        if self._skip_special_tokens and token in self._tokenizer.special_token_ids:
            return False
        return self._tokenizer.is_known(token)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._take(token) for token in ids if self._counts(token)])

    def _take(self, token: int) -> str:
        self._window.append(token)
        before, after = self._texts()
        num_pending = len(self._window) - self._num_read
        is_unsure = after.endswith(_REPLACEMENT) or len(after) <= len(before)
        if is_unsure and num_pending < _MAX_CHARACTER_TOKENS:
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._texts()
        self._num_read = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        skip = self._skip_special_tokens
        return (
            decode(self._window[: self._num_read], skip_special_tokens=skip),
            decode(self._window, skip_special_tokens=skip),
        )


class TextDelta(NamedTuple):
    """What some tokens added to an answer.

    text: new text, possibly "".
    matched_stop: the stop string that ended the answer, or None.
    num_tokens_used: how many of the ids given belong to the answer; fewer than were given only
        if a stop string was completed before the last one.
    """

    text: str
    matched_stop: str | None
    num_tokens_used: int


class OutputText:
    """The text of one answer: detokenizer and stop strings together.

    `min_tokens`: a stop string counts if its last character comes from token number `min_tokens`
    or a later one; it may begin earlier. (Before that, text that could begin such a match is held
    back as ever, so nothing of a stop string that counts is shown.)

    Raises RequestError if the stop strings are too long (see `StopMatcher`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | TokenIds,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, ids: Sequence[int] | TokenIds, *, ends: bool = False) -> TextDelta:
        """Take the next output ids.

        Args:
            ids: int32 [n] or a list of ints.
            ends: the last id is the end token (EOS or a stop token id) that ended the request.
                It belongs to the answer but gives no text, unless stop texts are to be included.
                (A special token gives none even then if special tokens are skipped.)

        Once a stop string has matched, further ids are not used.
        """
        if self._stopped:
            return TextDelta("", None, 0)
        if self._matcher is None and not ends:
            return TextDelta(self._detokenizer.push_list(_as_list(ids)), None, len(ids))
        tokens = _as_list(ids)
        shown = tokens[:-1] if ends and not self._include_stop else tokens
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(shown), None, len(tokens))
        released = []
        for place, token in enumerate(shown, start=1):
            self._num_tokens += 1
            text, matched = self._matcher.push(
                self._detokenizer.push((token,)), enabled=self._num_tokens >= self._min_tokens
            )
            released.append(text)
            if matched is not None:
                self._stopped = True
                return TextDelta("".join(released), matched, place)
        return TextDelta("".join(released), None, len(tokens))

    def finish(self) -> TextDelta:
        """The answer ended, for whatever reason: returns what was held back.

        The last half character may complete a stop string as U+FFFD; it then counts.
        """
        if self._stopped:
            return TextDelta("", None, 0)
        self._stopped = True
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(rest, None, 0)
        text, matched = self._matcher.push(rest, enabled=self._num_tokens >= self._min_tokens)
        if matched is None:
            text += self._matcher.finish()
        return TextDelta(text, matched, 0)
