"""`pelton generate` with a stub in the engine's place."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pelton.cli.main import main
from pelton.config.params import SamplingParams
from pelton.errors import ConfigError, RequestError
from pelton.sampling.table import PROCESSORS


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


class StubLLM:
    """Answers each prompt with its upper case, and an error for the prompt "bad"."""

    made: list[StubLLM]

    def __init__(self, **args: Any) -> None:
        if args.get("max_model_len") == 1:
            raise ConfigError("max_model_len must be at least 2, got 1.")
        self.args = args
        self.calls: list[tuple[str, Any, SamplingParams]] = []
        self.config = types.SimpleNamespace(
            generation=types.SimpleNamespace(sampling={"temperature": 0.25, "top_p": 0.5})
        )
        StubLLM.made.append(self)

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls.append(("generate", prompts, params))
        return [self._answer(i, prompt) for i, prompt in enumerate(prompts)]

    def chat(self, messages: list[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls.append(("chat", messages, params))
        return [self._answer(i, talk[-1]["content"]) for i, talk in enumerate(messages)]

    def _answer(self, index: int, prompt: str) -> Any:
        completions = [
            types.SimpleNamespace(
                index=number,
                text=prompt.upper() + "!" * number,
                token_ids=[1, 2],
                cumulative_logprob=np.float32(-0.5),
                logprobs=[{7: Logprob(-math.inf, 1, "é")}],
                finish_reason="error" if number == 2 else "stop",
                stop_reason=None,
            )
            for number in range(self.calls[-1][2].n)
        ]
        return types.SimpleNamespace(
            request_id=str(index),
            prompt=prompt,
            prompt_token_ids=np.asarray([3, 4], np.int32),
            prompt_logprobs=[None, {4: Logprob(-1.0, 2, "x")}],
            outputs=[] if prompt == "bad" else completions,
            finished=True,
            num_cached_tokens=0,
            error=RequestError("prompt is bad.", field="prompt") if prompt == "bad" else None,
        )


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubLLM]:
    StubLLM.made = []
    module = types.ModuleType("pelton.engine.llm")
    module.LLM = StubLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pelton.engine.llm", module)
    return StubLLM


def test_text_goes_out_and_speed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "HELLO\n"
    assert "2 tokens after 2 of prompt" in err
    assert "tokens/s" in err


def test_flags_reach_engine_and_request() -> None:
    words = "--prompt a m.gguf --dtype float32 --no-enable-prefix-caching --max-tokens 5".split()
    words += ["--seed", "9", "--stop", "x", "--stop", "y", "--hf-overrides", '{"k": 1}']
    assert main(["generate", *words]) == 0
    (llm,) = StubLLM.made
    assert llm.args == {
        "model": "m.gguf",
        "dtype": "float32",
        "enable_prefix_caching": False,
        "hf_overrides": {"k": 1},
    }
    ((verb, prompts, params),) = llm.calls
    assert (verb, prompts) == ("generate", ["a"])
    assert (params.max_tokens, params.seed, params.stop) == (5, 9, ("x", "y"))


def test_the_users_sampling_wins_over_the_checkpoints() -> None:
    assert main(["generate", "--prompt", "a", "--temperature", "0"]) == 0
    params = StubLLM.made[0].calls[0][2]
    assert (params.temperature, params.top_p) == (0.0, 0.5)


def test_json_has_one_object_per_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--json", "--prompt", "é", "--prompt", "b"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "request_id": "0",
        "prompt": "é",
        "prompt_token_ids": [3, 4],
        "prompt_logprobs": [None, {"4": {"logprob": -1.0, "rank": 2, "decoded_token": "x"}}],
        "outputs": [
            {
                "index": 0,
                "text": "É",
                "token_ids": [1, 2],
                "cumulative_logprob": -0.5,
                "logprobs": [{"7": {"logprob": None, "rank": 1, "decoded_token": "é"}}],
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "finished": True,
        "num_cached_tokens": 0,
        "error": None,
    }
    assert second["prompt"] == "b"


def test_a_failed_prompt_leaves_the_others_and_sets_the_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--prompt", "bad", "--prompt", "b"]) == 2
    out, err = capsys.readouterr()
    assert out == "[2] B\n"
    assert "prompt 1: prompt is bad." in err
    assert main(["generate", "--json", "--prompt", "bad"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "prompt is bad."


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
    assert main(["generate", "--prompt", "-"]) == 0
    assert capsys.readouterr().out == "TWO\nLINES\n"


def test_standard_input_that_is_not_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    assert main(["generate", "--prompt", "-"]) == 2
    assert "must be text in utf-8" in capsys.readouterr().err


def test_chat_sends_messages() -> None:
    assert main(["generate", "--chat", "--prompt", "hi"]) == 0
    verb, messages, _ = StubLLM.made[0].calls[0]
    assert (verb, messages) == ("chat", [[{"role": "user", "content": "hi"}]])


def test_a_wrong_value_is_refused_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--prompt", "a", "--top-p", "2"]) == 2
    assert "top_p must be in (0, 1], got 2.0." in capsys.readouterr().err
    assert StubLLM.made == []


def test_a_config_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a", "--max-model-len", "1"]) == 2
    assert capsys.readouterr().err == "pelton: max_model_len must be at least 2, got 1.\n"


def test_a_prompt_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate"])
    assert stop.value.code == 2
    assert "--prompt" in capsys.readouterr().err


def test_every_sampling_field_has_a_flag_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROCESSORS, "a", "module:function")
    words = "--json --n 2 --logprobs 1 --prompt-logprobs 3 --no-skip-special-tokens".split()
    words += ["--include-stop-str-in-output", "--logits-processors", '{"a": {"x": 1}}']
    words += ["--logit-bias", '{"5": -2}', "--bad-words", "no", "--stop-token-ids", "7"]
    assert main(["generate", "--prompt", "a", *words]) == 0
    params = StubLLM.made[0].calls[0][2]
    assert (params.n, params.logprobs, params.prompt_logprobs) == (2, 1, 3)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert params.logits_processors == {"a": {"x": 1}}
    assert (params.logit_bias, params.bad_words) == ({5: -2.0}, ("no",))
    assert params.stop_token_ids == (7,)


def test_all_answers_are_printed_but_those_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--n", "4", "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "[1] A\n[2] A!\n[4] A!!!\n"
    assert main(["generate", "--n", "2", "--prompt", "a", "--prompt", "b"]) == 0
    assert capsys.readouterr().out == "[1.1] A\n[1.2] A!\n[2.1] B\n[2.2] B!\n"


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_logprobs_need_json(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--prompt", "a", flag, "1"])
    assert stop.value.code == 2
    assert f"{flag} is printed with --json alone; add --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--promt", "a"], "unknown flag --promt; did you mean --prompt?"),
        (["--promt=a"], "unknown flag --promt; did you mean --prompt?"),
        (["--max_token", "3"], "unknown flag --max_token; did you mean --max-tokens?"),
        (["--model", "m", "--prompt", "a"], "the model is given without a flag"),
    ],
)
def test_a_mistyped_flag_is_named_before_what_is_missing(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *words])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_a_value_may_look_like_a_flag() -> None:
    assert main(["generate", "--prompt=--x", "--prompt", "--a b"]) == 0
    assert StubLLM.made[0].calls[0][1] == ["--x", "--a b"]


def test_an_unknown_processor_is_told_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("zzz", '["zzz"]', '{"zzz": {}}'):
        assert main(["generate", "--prompt", "a", "--logits-processors", value]) == 2
        assert "names 'zzz', which is not registered" in capsys.readouterr().err
    assert StubLLM.made == []
