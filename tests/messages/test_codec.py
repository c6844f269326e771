"""Messages survive the wire as they are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.config.params import SamplingParams
from pelton.core.plan import LogprobRows
from pelton.core.prompt_embeds import STORED_AS, PromptEmbeds
from pelton.core.scheduler import SchedulerStats
from pelton.errors import RequestError, RequestFailed
from pelton.messages.codec import decode_from_engine, decode_to_engine, encode
from pelton.messages.from_engine import (
    CacheReset,
    Dead,
    Ended,
    Fault,
    First,
    Hello,
    Outputs,
    Phase,
    Ready,
    StepStats,
)
from pelton.messages.logprobs import PackedRows, pack_rows, unpack_rows
from pelton.messages.to_engine import (
    Abort,
    AddRequest,
    PackedEmbeds,
    ResetPrefixCache,
    Shutdown,
    Start,
    pack_embeds,
    pack_params,
    pack_token_ids,
    unpack_embeds,
    unpack_token_ids,
)

ROWS = PackedRows(1, b"\0" * 4, b"\1\0\0\0", b"\0" * 4, b"\0" * 4)
STATS = SchedulerStats(1, 2, 0.5, 3, 4, 5, 6, 7, (8, 9), 10, 11, 12, 13, 14)
FAULT = Fault("request", "seed is wrong", "seed")


@pytest.mark.parametrize(
    "message",
    [
        Start(1, b"abc", 20, {"a:B": {"c": "d:e"}}),
        AddRequest(2**40, "r", b"\1\0\0\0", {"n": 3, "logit_bias": {5: 1.0}}, (2,), -1, "salt"),
        AddRequest(1, "r", b"", {}, embeds=PackedEmbeds("bfloat16", 2, memoryview(b"abcd"))),
        Abort(5, 3),
        ResetPrefixCache(),
        Shutdown(),
    ],
)
def test_to_engine(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, 77),
        Phase("imports", 1.5),
        Ready(b"abc"),
        Outputs(
            b"\0" * 8, b"", b"\0" * 4, [First(0, 16, 0.1, ROWS)], [Ended(0, "error", 2, 5, FAULT)],
            STATS, StepStats(1, 1, 0.5), b"\1\0\0\0", ROWS,
        ),
        CacheReset(True),
        Dead("ConfigError", "no", "Traceback"),
    ],
)  # fmt: skip
def test_from_engine(message):
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize(
    "frame", [b"", b"\x90", b"nonsense", encode(Hello(1, 2)), b"\x91\xa5hello"]
)
def test_what_is_no_message(frame):
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(frame)


CHANGED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "max_tokens": None, "seed": -(2**63)},
    {"n": 3, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 2**63 - 1},
    {"stop": ["a", "b"], "stop_token_ids": [5, 6], "min_tokens": 2, "ignore_eos": True},
    {"logit_bias": {"5": 1, 6: -2.5}, "allowed_token_ids": [1, 2], "bad_words": ["no"]},
    {"logits_processors": {"p": {"x": [1, "a", None]}}, "logprobs": 0, "prompt_logprobs": 0},
    {"presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.1},
    {"detokenize": False, "skip_special_tokens": False, "include_stop_str_in_output": True},
    {"bad_words_token_ids": ((1, 2), (3,))},
]


@pytest.mark.parametrize("changes", CHANGED)
def test_params(changes):
    """Every field arrives as it was; only the fields that were set travel."""
    params = SamplingParams(**changes)
    packed = pack_params(params)
    assert set(packed) == {
        name for name in changes if getattr(params, name) != getattr(SamplingParams(), name)
    }
    message = decode_to_engine(encode(AddRequest(0, "r", b"", packed)))
    assert isinstance(message, AddRequest)
    assert SamplingParams(**message.params) == params


def test_the_list_of_changes_has_every_field():
    not_yet = {"best_of", "structured_outputs"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - not_yet == set().union(*CHANGED)


@pytest.mark.parametrize("ids", [[], [0], [5, 2**31 - 1, 7]])
def test_token_ids(ids):
    given = np.array(ids, np.int32)
    assert unpack_token_ids(pack_token_ids(given)).tolist() == ids


def test_logprob_rows():
    rng = np.random.default_rng(0)
    rows = LogprobRows(
        offsets=np.array([0, 2, 5], np.int32),
        token_logprobs=rng.normal(size=5).astype(np.float32),
        ranks=np.arange(1, 6, dtype=np.int32),
        top_ids=rng.integers(0, 99, (5, 3)).astype(np.int32),
        top_logprobs=rng.normal(size=(5, 3)).astype(np.float32),
    )
    for chosen in (np.array([3, 0], np.int32), slice(1, 4), np.array([], np.int32)):
        found = unpack_rows(pack_rows(rows, chosen))
        for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(found, name), getattr(rows, name)[chosen])
            assert getattr(found, name).dtype == getattr(rows, name).dtype
        assert found.offsets.tolist() == [0, len(found.ranks)]
    with pytest.raises(ValueError):
        unpack_rows(PackedRows(2, b"\0" * 4, b"\0" * 8, b"", b""))


def test_faults():
    for error, kind in (
        (RequestError("seed is wrong", field="seed"), RequestError),
        (RequestFailed("it broke"), RequestFailed),
        (KeyError("x"), RequestFailed),
    ):
        told = Fault.of(error).as_error()
        assert type(told) is kind
        assert getattr(told, "field", None) == getattr(error, "field", None)
        assert str(error) in str(told)


def test_without_the_server_extra():
    """The offline LLM imports without it, and the rest says what to install."""
    code = (
        "import sys\n"
        "sys.modules['msgspec'] = sys.modules['zmq'] = None\n"
        "import pelton.engine.llm\n"
        "try:\n"
        "    import pelton.engine.async_llm\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pelton[server]" in done.stdout


@pytest.mark.parametrize("dtype", STORED_AS)
def test_embeds(dtype):
    rows = np.arange(6).reshape(2, 3).astype(STORED_AS[dtype])
    message = AddRequest(1, "r", b"", {}, embeds=pack_embeds(PromptEmbeds(rows, dtype)))
    arrived = decode_to_engine(encode(message))
    assert isinstance(arrived, AddRequest)
    assert arrived.embeds is not None
    found = unpack_embeds(arrived.embeds)
    assert found.dtype == dtype
    assert found.rows.dtype == rows.dtype
    assert (found.rows == rows).all()
