"""POST /tokenize and /detokenize."""

from __future__ import annotations

from pelton.errors import RequestError
from pelton.server.bodies import beside_loop, parse_body, read_body
from pelton.server.endpoint import Answer, Call
from pelton.server.protocol import DetokenizeBody, Text, TokenizeBody, Tokens
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes


async def tokenize(state: ServerState, call: Call) -> Answer:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    raw = await read_body(call.request, state.args)
    body = await parse_body(state.pool, raw, TokenizeBody)
    state.service.check_model(body.model)
    ids = await state.reader.tokens(body)
    return Answer(await beside_loop(state.pool, len(ids) < 1000, _tokens, state, body, ids))


def _tokens(state: ServerState, body: TokenizeBody, ids: list[int]) -> bytes:
    strings = None
    if body.return_token_strs:
        strings = [state.reader.tokenizer.token_text(token) for token in ids]
    return json_bytes(
        Tokens(count=len(ids), max_model_len=state.max_model_len, tokens=ids, token_strs=strings)
    )


async def detokenize(state: ServerState, call: Call) -> Answer:
    """The text of token ids, special tokens included."""
    raw = await read_body(call.request, state.args)
    body = await parse_body(state.pool, raw, DetokenizeBody)
    state.service.check_model(body.model)
    is_small = len(body.tokens) < 1000
    return Answer(await beside_loop(state.pool, is_small, _text, state, body))


def _text(state: ServerState, body: DetokenizeBody) -> bytes:
    tokenizer = state.reader.tokenizer
    for token in body.tokens:
        if not tokenizer.is_known(token):
            raise RequestError(
                f"tokens holds {token}; the tokenizer has no such id among 0 to "
                f"{tokenizer.vocab_size - 1}.",
                field="tokens",
            )
    return json_bytes(Text(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False)))
