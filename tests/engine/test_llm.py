"""The offline API on a tiny checkpoint with a tokenizer of its own."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import new_folder
from support.logits import forget_recordings, hook_logits
from support.plain import greedy, plain_tokens
from support.tiny import make_config, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pelton import LLM, SamplingParams
from pelton.device.native.library import library
from pelton.engine.interrupts import InterruptsBetweenSteps
from pelton.engine.llm import _log_start
from pelton.errors import ConfigError, EngineError, RequestError, RequestFailed

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TEXTS = ("A turbine turns", "water and light", "the wheel of 1880", "so it goes, and goes")


@functools.cache
def backend() -> Tokenizer:
    """Byte-level BPE with every byte and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "the turbine and the wheel turn and turn"] * 4, trainer)
    return tokenizer


@functools.cache
def folder() -> Path:
    target = new_folder("llm")
    size = backend().get_vocab_size()
    shutil.copytree(tiny_llama(vocab_size=size), target, dirs_exist_ok=True)
    backend().save(str(target / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "num_threads": 1,
}


def make_llm(**changes: Any) -> LLM:
    return LLM(str(folder()), **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make_llm()


@pytest.fixture(params=["cpu", "fake"])
def llm(request: Any) -> Any:
    llm = make_llm(device=request.param)
    yield llm
    llm.close()
    assert not llm._loop.scheduler.has_unfinished()


def ids(text: str) -> list[int]:
    return backend().encode(text).ids


def expected(text: str, params: SamplingParams) -> list[int]:
    return plain_tokens(ids(text), params, folder=folder())


def text_of(tokens: list[int]) -> str:
    return backend().decode(tokens, skip_special_tokens=True)


def ask(llm: LLM, prompts: Any, params: Any = None, **kwargs: Any) -> list[Any]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **kwargs)


def check_answers(llm: LLM, texts: Any = TEXTS) -> None:
    for output, text in zip(ask(llm, list(texts)), texts, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == expected(text, greedy())


def test_text_ids_and_batches(llm):
    check_answers(llm)
    (lone,) = ask(llm, TEXTS[0])
    (named,) = ask(llm, {"prompt": TEXTS[0]})
    (given,) = ask(llm, {"prompt_token_ids": ids(TEXTS[0])})
    tokens = expected(TEXTS[0], greedy())
    for output, text in ((lone, TEXTS[0]), (named, TEXTS[0]), (given, None)):
        assert output.finished
        assert output.prompt == text
        assert output.prompt_token_ids == ids(TEXTS[0])
        (answer,) = output.outputs
        assert answer.token_ids == tokens
        assert answer.text == text_of(tokens)
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert answer.logprobs is None
        assert answer.cumulative_logprob is None
    assert ask(llm, []) == []
    assert len({output.request_id for output in (lone, named, given)}) == 3
    assert given.num_cached_tokens == (len(ids(TEXTS[0])) - 1) // 4 * 4


def test_params_for_each_prompt(shared):
    params = [greedy(3), greedy(7)]
    for output, text, one in zip(ask(shared, list(TEXTS[:2]), params), TEXTS, params):
        assert output.outputs[0].token_ids == expected(text, one)
    for wrong in ([greedy()], [greedy(), 5], {"max_tokens": 3}):
        with pytest.raises(RequestError, match="sampling_params"):
            ask(shared, list(TEXTS[:2]), wrong)


def test_checkpoint_defaults_are_used(shared):
    defaults = shared.get_default_sampling_params()
    assert defaults == SamplingParams()
    (output,) = shared.generate([TEXTS[0]], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= defaults.max_tokens


BAD = [
    {"prompt_token_ids": [999999]},
    {"prompt_token_ids": [-1]},
    {"prompt_token_ids": [2**40]},
    {"prompt_token_ids": []},
    {"prompt_token_ids": [1.5]},
    {"prompt_token_ids": "abc"},
    {"prompt_token_ids": [[1, 2]]},
    {"prompt": 7},
    {"prompt": 7, "prompt_token_ids": [5]},
    {"promt": "x"},
    {},
    {"prompt": "x", "cache_salt": ""},
    {"prompt": "\ud800"},
    {"prompt": "x" * 400},
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_prompts(bad, shared):
    """Cases 3 and 26: a lone one raises, one among others is told apart and hurts nobody."""
    with pytest.raises(RequestError):
        ask(shared, bad)
    good, wrong, last = ask(shared, [TEXTS[0], bad, TEXTS[1]])
    assert isinstance(wrong.error, RequestError)
    assert wrong.finished
    assert wrong.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == expected(TEXTS[0], greedy())
    assert last.outputs[0].token_ids == expected(TEXTS[1], greedy())


def test_a_prompt_of_another_type(shared):
    outputs = ask(shared, [5, TEXTS[0], None])
    assert [type(output.error) for output in outputs] == [RequestError, type(None), RequestError]


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": [999999], "min_tokens": 1},
        {"logprobs": 10**6},
        {"stop_token_ids": list(range(3, 200)), "min_tokens": 1},
        {"stop": ["x" * 10**6]},
        {"logit_bias": {"999999": 5}},
        {"logit_bias": {"-1": 5}},
        {"allowed_token_ids": [320]},
        {"logits_processors": ["nobody"]},
    ],
)
def test_bad_params_hurt_one_request(changes, shared):
    """Case 26."""
    wrong, good = ask(shared, list(TEXTS[:2]), [greedy(4, **changes), greedy()])
    assert isinstance(wrong.error, RequestError), wrong
    assert wrong.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == expected(TEXTS[1], greedy())


def test_bad_words_do_not_come(shared):
    """Tokens of the greedy answer, given as words: until the first would come, nothing changes."""
    num_tried = 0
    for text in TEXTS:
        plain = expected(text, greedy(30))
        pieces = [text_of([token]) for token in plain]
        words = [piece for piece in pieces if piece.isascii() and piece.strip()]
        words = [word for word in words if word.isprintable() and len(ids(word.lstrip())) == 1][:3]
        if not words:
            continue
        num_tried += 1
        (output,) = ask(shared, text, greedy(30, bad_words=words))
        tokens = output.outputs[0].token_ids
        banned = {sequence[0] for word in words if len(sequence := ids(word.lstrip())) == 1}
        banned |= {sequence[0] for word in words if len(sequence := ids(" " + word.lstrip())) == 1}
        first = next(place for place, token in enumerate(plain) if token in banned)
        assert not banned & set(tokens)
        assert tokens[:first] == plain[:first]
    assert num_tried >= 2


def test_bad_words_become_both_forms(shared):
    request, _ = shared._reader.read("r", TEXTS[0], greedy(bad_words=["wheel", " wheel", "go"]))
    found = request.params.bad_words_token_ids
    assert set(found) == {tuple(ids(form)) for form in ("wheel", " wheel", "go", " go")}
    assert len({len(word) for word in found}) > 1


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        LLM(str(folder()), max_modle_len=3)
    with pytest.raises(ConfigError, match="attention_backend"):
        make_llm(attention_backend="flash")


def stop_after(text: str, count: int) -> tuple[str, str]:
    """A piece of the greedy answer that first ends at token `count`, and what stands before it."""
    tokens = expected(text, greedy(30))
    before, whole = text_of(tokens[: count - 1]), text_of(tokens[:count])
    for size in range(1, len(whole)):
        piece = whole[-size:]
        if "\ufffd" not in piece and piece not in whole[:-1] and len(whole) > len(before):
            return piece, whole[:-size]
    raise AssertionError("choose another fixture")


def printable_cut(text: str) -> tuple[int, str, str]:
    for count in range(3, 28):
        try:
            piece, before = stop_after(text, count)
        except AssertionError:
            continue
        if "\ufffd" not in piece:
            return count, piece, before
    raise AssertionError("choose another fixture")


def test_stop_strings(llm):
    """Cut from the text, the request ends early, usage counts the tokens made."""
    count, piece, before = printable_cut(TEXTS[0])
    for include in (False, True):
        params = greedy(30, stop=[piece, "never there"], include_stop_str_in_output=include)
        stopped, other = ask(llm, list(TEXTS[:2]), [params, greedy(30)])
        (answer,) = stopped.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", piece)
        assert answer.text == before + (piece if include else "")
        assert answer.token_ids == expected(TEXTS[0], greedy(30))[:count]
        assert other.outputs[0].token_ids == expected(TEXTS[1], greedy(30))
    (later,) = ask(llm, TEXTS[0], greedy(30, stop=piece, min_tokens=count + 1))
    assert len(later.outputs[0].token_ids) > count
    assert later.outputs[0].text.startswith(before + piece)


def test_stop_ids(llm):
    tokens = expected(TEXTS[0], greedy(20))
    cut = next(i for i in range(2, 20) if tokens[i] not in tokens[:i])
    (output,) = ask(llm, TEXTS[0], greedy(20, stop_token_ids=[tokens[cut]]))
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", tokens[cut])
    assert answer.token_ids == tokens[: cut + 1]
    assert answer.text == text_of(tokens[:cut])
    params = greedy(20, stop_token_ids=[tokens[cut]], include_stop_str_in_output=True)
    assert ask(llm, TEXTS[0], params)[0].outputs[0].text == text_of(tokens[: cut + 1])


def force(llm: LLM, token: int, call: int) -> None:
    """Make `token` the most likely of every row at that call of the head."""
    calls = iter(range(10**9))

    def change(logits: torch.Tensor) -> None:
        if next(calls) == call:
            logits[:, token] = 1e4

    hook_logits(llm._worker.model, change)
    forget_recordings(llm._worker)


@pytest.mark.parametrize(
    ("changes", "reason", "count"),
    [
        ({}, "stop", 4),
        ({"ignore_eos": True}, "length", 12),
        ({"min_tokens": 4}, "length", 12),
        ({"min_tokens": 3}, "stop", 4),
    ],
)
def test_end_of_sequence(changes, reason, count):
    """The model's own end token; its stop_reason is None. It may follow min_tokens others."""
    llm = make_llm()
    force(llm, 2, 3)
    params = SamplingParams(temperature=0.0, max_tokens=12, **changes)
    (output,) = ask(llm, TEXTS[0], params)
    (answer,) = output.outputs
    # Without the forced token the tiny model must not end by itself.
    assert 2 not in expected(TEXTS[0], greedy())
    assert (answer.finish_reason, answer.stop_reason) == (reason, None)
    assert len(answer.token_ids) == count
    assert (answer.token_ids[3] == 2) == (changes != {"min_tokens": 4})


@pytest.mark.parametrize("wanted", [0, 1, 3, 20])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs(wanted, temperature, shared):
    """Case 17: n distinct entries sorted by value, the sampled token in any case."""
    params = SamplingParams(
        temperature=temperature, max_tokens=10, ignore_eos=True, logprobs=wanted, seed=1
    )
    plain = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, seed=1)
    outputs = ask(shared, list(TEXTS[:2]), [params, plain])
    (answer,) = outputs[0].outputs
    assert answer.token_ids == expected(TEXTS[0], params)
    assert outputs[1].outputs[0].logprobs is None
    outside = 0
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entry
        assert entry[token].rank >= 1
        top = sorted(entry.items(), key=lambda item: item[1].rank)
        inside = [item for item in top if item[1].rank <= wanted]
        assert len(inside) == wanted
        values = [item[1].logprob for item in inside]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
        assert len(entry) == wanted + (entry[token].rank > wanted)
        outside += entry[token].rank > wanted
        for one, logprob in entry.items():
            assert logprob.decoded_token == shared.get_tokenizer().token_text(one)
    if temperature and wanted < 4:
        assert outside
    total = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_no_limit_but_the_context(shared):
    (output,) = ask(shared, TEXTS[0], greedy(None))
    (answer,) = output.outputs
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 96 - len(ids(TEXTS[0]))


def test_without_detokenizing(shared):
    (output,) = ask(shared, TEXTS[0], greedy(detokenize=False))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == expected(TEXTS[0], greedy())


def test_special_tokens_in_text():
    llm = make_llm()
    force(llm, 1, 2)
    shown = greedy(5, skip_special_tokens=False)
    (output,) = ask(llm, TEXTS[0], shown)
    assert "<s>" in output.outputs[0].text
    assert output.outputs[0].text == backend().decode(
        output.outputs[0].token_ids, skip_special_tokens=False
    )


def test_progress_bar(shared, capsys):
    shared.generate([TEXTS[0], {"prompt_token_ids": [999]}], greedy(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    shared.generate([TEXTS[0]], greedy(), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_priority():
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    admitted = []
    read = llm._loop.scheduler._kv.admit

    def admit(request: Any) -> bool:
        admitted.append(request.request_id)
        return read(request)

    llm._loop.scheduler._kv.admit = admit  # type: ignore[method-assign]
    outputs = ask(llm, list(TEXTS[:3]), priority=[5, 0, -2])
    assert admitted == [outputs[2].request_id, outputs[1].request_id, outputs[0].request_id]
    with pytest.raises(RequestError, match="priority"):
        ask(llm, list(TEXTS), priority=[1])


def test_cache_salt():
    """Only the same salt finds a prompt's blocks again."""
    llm, text = make_llm(), " ".join(TEXTS)
    hits = []
    for salt in ("a", "b", "a", None):
        prompt = {"prompt": text} | ({"cache_salt": salt} if salt else {})
        (output,) = ask(llm, prompt)
        hits.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == expected(text, greedy())
    full = (len(ids(text)) - 1) // 4 * 4
    assert full > 0
    assert hits == [0, 0, full, 0]
    assert llm.reset_prefix_cache()
    assert ask(llm, {"prompt": text, "cache_salt": "a"})[0].num_cached_tokens == 0


def test_chat(llm):
    messages = [{"role": "user", "content": "turn the wheel"}]
    rendered = "<s>user: turn the wheel</s><s>assistant: "
    tokens = backend().encode(rendered, add_special_tokens=False).ids
    assert tokens.count(1) == 2
    (output,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert output.prompt == rendered
    assert output.prompt_token_ids == tokens
    assert output.outputs[0].token_ids == plain_tokens(tokens, greedy(), folder=folder())
    both = llm.chat([messages, messages[:1]], greedy(), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in both] == [output.outputs[0].token_ids] * 2
    with pytest.raises(RequestError, match="no role clown"):
        llm.chat([{"role": "clown", "content": "x"}], greedy(), use_tqdm=False)
    check_answers(llm)


def test_without_a_tokenizer():
    llm = LLM(str(tiny_llama()), **SETTINGS)
    (output,) = ask(llm, {"prompt_token_ids": [5, 6, 7]}, greedy(logprobs=1))
    assert output.outputs[0].token_ids == plain_tokens([5, 6, 7], greedy())
    assert output.outputs[0].text == ""
    for prompt, params in (
        ("text", greedy()),
        ({"prompt_token_ids": [5]}, greedy(stop="x")),
        ({"prompt_token_ids": [5]}, greedy(bad_words=["x"])),
    ):
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            ask(llm, prompt, params)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        llm.get_tokenizer()


# Faults.


class Fault(Exception):
    pass


def fault(*args: Any, **kwargs: Any) -> Any:
    raise Fault("on purpose")


def only_for(original: Any, is_victim: Any, error: type[BaseException] = Fault) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if is_victim(*args):
            raise error("on purpose")
        return original(*args, **kwargs)

    return hooked


def inject(llm: LLM, stage: str, monkeypatch: Any) -> None:
    """Make one stage fail for the request of TEXTS[1]."""
    import pelton.engine.open_requests as module
    from pelton.tokens.detokenizer import OutputText

    victim = ids(TEXTS[1])

    def is_request(request: Any) -> bool:
        return request.known_token_ids[: len(victim)].tolist() == victim

    if stage == "encode":
        tokenizer = llm.get_tokenizer()
        monkeypatch.setattr(
            tokenizer, "encode", only_for(tokenizer.encode, lambda text: text == TEXTS[1])
        )
    elif stage == "add":
        llm._open._add = only_for(llm._open._add, is_request)  # type: ignore[method-assign]
    elif stage == "answer":
        monkeypatch.setattr(
            module, "Answer", only_for(module.Answer, lambda request, *rest: is_request(request))
        )
    elif stage == "sampler":
        runner = llm._worker._assembled.runner
        runner._add_hooks = tuple(
            only_for(hook, lambda row: row.token_ids.tolist() == victim)
            for hook in runner._add_hooks
        )
    elif stage == "head":
        calls = iter(range(10**9))

        def change(logits: torch.Tensor) -> None:
            if next(calls) == 3:
                logits[1] = torch.nan

        hook_logits(llm._worker.model, change)
        forget_recordings(llm._worker)
    elif stage == "detokenizer":
        push = OutputText.push

        def failing(self: Any, tokens: Any, **kwargs: Any) -> Any:
            if tokens[0] == expected(TEXTS[1], greedy())[2]:
                raise Fault("on purpose")
            return push(self, tokens, **kwargs)

        monkeypatch.setattr(OutputText, "push", failing)
    elif stage == "logprobs":
        take = module.Answer._take_logprobs
        monkeypatch.setattr(
            module.Answer,
            "_take_logprobs",
            only_for(take, lambda self, *rest: is_request(self.request)),
        )


STAGES = ["encode", "answer", "add", "sampler", "head", "detokenizer", "logprobs"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_hurts_one_request(stage, llm):
    """Cases 19, 25, 26: the witnesses, one beside it and one behind it, do not notice."""
    assert expected(TEXTS[1], greedy())[2] not in (
        expected(TEXTS[0], greedy()) + expected(TEXTS[2], greedy())
    )
    params = greedy(logprobs=2)
    with pytest.MonkeyPatch.context() as patch:
        inject(llm, stage, patch)
        first, victim, last = ask(llm, list(TEXTS[:3]), params)
    for output, text in ((first, TEXTS[0]), (last, TEXTS[2])):
        assert output.error is None
        assert output.outputs[0].token_ids == expected(text, greedy())
        assert output.outputs[0].text == text_of(expected(text, greedy()))
        assert len(output.outputs[0].logprobs) == 12
    assert victim.finished
    assert victim.outputs[0].finish_reason == "error"
    assert isinstance(victim.error, (RequestFailed, Fault))
    if stage not in ("add", "sampler", "head"):
        check_answers(llm)
    else:
        check_answers(llm, (TEXTS[0], TEXTS[2], TEXTS[3]))


@pytest.mark.parametrize("where", ["layers", "head"])
def test_a_fault_of_a_whole_step(where, llm):
    """It ends exactly the step's requests; those behind are served, and so is the next call."""
    runner = llm._worker._assembled.runner
    target = {"layers": runner._executor, "head": runner._head}[where]
    calls = iter(range(10**9))
    target.run = only_for(target.run, lambda *args: next(calls) == 4)
    outputs = ask(llm, list(TEXTS))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2 + ["length"] * 2
    for output, text in zip(outputs[2:], TEXTS[2:]):
        assert output.outputs[0].token_ids == expected(text, greedy())
    for output, text in zip(outputs[:2], TEXTS[:2]):
        assert isinstance(output.error, Fault)
        got = output.outputs[0].token_ids
        assert got == expected(text, greedy())[: len(got)]
    check_answers(llm)


def places(llm: LLM) -> dict[str, tuple[Any, str]]:
    import pelton.engine.open_requests as module

    return {
        "encode": (llm.get_tokenizer(), "encode"),
        "add": (llm._open, "_add"),
        "schedule": (llm._loop.scheduler, "schedule"),
        "start": (llm._worker._assembled.runner, "start"),
        "finish": (llm._worker._assembled.runner, "finish"),
        "update": (llm._loop.scheduler, "update"),
        "take": (module.Answer, "take"),
    }


def check_usable_again(llm: LLM) -> None:
    assert len(llm._open) == 0
    assert not llm._loop.scheduler.has_unfinished()
    for _ in range(2):
        check_answers(llm)
    llm._loop.scheduler.check_integrity()


@pytest.mark.parametrize(
    "where", ["encode", "add", "schedule", "start", "finish", "update", "take"]
)
def test_control_c(where, llm):
    """A real SIGINT, wherever it hits: KeyboardInterrupt, nothing left behind, the LLM usable."""
    target, name = places(llm)[where]
    handler, calls = signal.getsignal(signal.SIGINT), iter(range(10**9))
    original = getattr(target, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, hooked)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, list(TEXTS))
    assert signal.getsignal(signal.SIGINT) is handler
    check_usable_again(llm)


@pytest.mark.parametrize("where", ["encode", "take", "layers", "head"])
def test_an_impatient_interrupt(where, llm):
    """The second Ctrl-C, or SystemExit: at once, out of encoding, a launch, or an answer."""
    runner = llm._worker._assembled.runner
    more = {"layers": (runner._executor, "run"), "head": (runner._head, "run")}
    target, name = {**places(llm), **more}[where]
    calls = iter(range(10**9))
    with pytest.MonkeyPatch.context() as patch:
        hooked = only_for(getattr(target, name), lambda *args: next(calls) == 3, KeyboardInterrupt)
        patch.setattr(target, name, hooked)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, list(TEXTS))
    check_usable_again(llm)


def press_control_c(times: int) -> None:
    with InterruptsBetweenSteps():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        if times > 1:
            raise AssertionError("still here")


@pytest.mark.parametrize("times", [1, 2])
def test_the_second_control_c_does_not_wait(times):
    """The first one is raised at the end, if nobody has checked."""
    with pytest.raises(KeyboardInterrupt):
        press_control_c(times)


def test_own_handlers_and_threads_are_left_alone():
    seen = []
    own = signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        with InterruptsBetweenSteps() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, own)
    assert len(seen) == 1
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(ask(make_llm(), TEXTS[0])))
    thread.start()
    thread.join()
    assert outputs[0].outputs[0].token_ids == expected(TEXTS[0], greedy())


@pytest.mark.parametrize(("block_size", "caching"), [(512, True), (1024, True), (1024, False)])
def test_a_long_smallest_prefix_is_warned_of(caplog, block_size, caching):
    """Case 11: above 512 tokens, and only where prefixes are reused at all."""
    config = make_config(tiny_llama(), block_size=block_size, enable_prefix_caching=caching)
    with caplog.at_level("INFO", logger="pelton"):
        _log_start(config, {})
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == int(block_size > 512 and caching)
    assert all("fewer than 1024 tokens" in text for text in texts)


@pytest.mark.parametrize("args", [{}, {"staging_mode": "pageable"}])
def test_a_start_tells_once_how_host_memory_reaches_the_device(capsys, monkeypatch, args):
    """Of the first LLM of a process, too, in which nobody has set up logging."""
    logger = logging.getLogger("pelton")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()
    try:
        make_llm(**args)
    finally:
        monkeypatch.undo()
        logger.manager._clear_cache()
    told = capsys.readouterr().err.splitlines()
    lines = [line for line in told if "Staging" in line]
    mode = args.get("staging_mode", "aliased")
    assert len(lines) == 1
    assert lines[0].startswith(f"Staging memory of cpu: {mode} (")
    assert lines[0].endswith("; 0 bytes of large tables lie in device memory.")
    kernels = library()
    said = [] if kernels is None else [f"CPU kernels of level {kernels.level} serve."]
    assert [line for line in told if "CPU kernels" in line] == said


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_slow_dtype_of_a_cpu_is_warned_of(caplog, dtype):
    with caplog.at_level("INFO", logger="pelton"):
        _log_start(make_config(tiny_llama(), dtype=dtype), {})
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == int(dtype == "float16")
    assert all("dtype='bfloat16' is the fastest" in text for text in texts)


def test_threads_take_turns():
    """Calls from several threads on one LLM: each gets its own answers."""
    llm, found = make_llm(), {}

    def work(name: int) -> None:
        found[name] = [o.outputs[0].token_ids for o in ask(llm, list(TEXTS[:2]))]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = [expected(text, greedy()) for text in TEXTS[:2]]
    assert found == dict.fromkeys(range(4), right)
    check_answers(llm)


def test_one_bad_conversation_hurts_only_itself(shared):
    good = [{"role": "user", "content": "hi"}]
    conversations = [good, [{"role": "user", "content": 5}], None, good]
    outputs = shared.chat(conversations, greedy(), use_tqdm=False)
    assert [output.outputs[0].finish_reason == "error" for output in outputs] == [0, 1, 1, 0]
    assert all(isinstance(outputs[i].error, RequestError) for i in (1, 2))
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids


@pytest.mark.parametrize("prompts", [None, 5, [1, 2, 3], b"text", {1, 2}], ids=str)
def test_what_is_no_list_of_prompts(shared, prompts):
    with pytest.raises(RequestError, match="prompt_token_ids"):
        ask(shared, prompts)


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "x"}, []], ids=str)
def test_what_is_no_conversation(shared, messages):
    with pytest.raises(RequestError, match="messages"):
        shared.chat(messages, greedy(), use_tqdm=False)


@pytest.mark.parametrize("params", [5, "greedy", [5]], ids=str)
def test_what_is_no_sampling_params(shared, params):
    with pytest.raises(RequestError, match="sampling_params"):
        shared.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("priority", [["a"], [None], [1.5], [True], 5, "1"], ids=str)
def test_priority_that_is_none(priority):
    llm = make_llm(scheduling_policy="priority")
    with pytest.raises(RequestError, match="priority"):
        ask(llm, ["a"], priority=priority)


def test_priority_under_fcfs_is_refused(shared):
    with pytest.raises(RequestError, match="scheduling_policy"):
        ask(shared, ["a"], priority=[1])


def test_a_closed_llm_takes_no_request():
    llm = make_llm()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        ask(llm, "a")


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 15, 17])
def test_short_contexts(max_model_len):
    """Also below what the warm-up would like to run."""
    llm = make_llm(max_model_len=max_model_len)
    prompt = {"prompt_token_ids": ids("water")[:1]}
    (output,) = ask(llm, prompt, greedy(1))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 123),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("detokenize", "no"),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("temperature", 10**400),
        ("top_p", float("nan")),
    ],
)
def test_parameters_of_the_wrong_type(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_integrity_is_proven_when_the_engine_is_idle():
    llm, calls = make_llm(), []
    check = llm._loop.scheduler.check_integrity
    llm._loop.scheduler.check_integrity = lambda: calls.append(check())  # type: ignore[method-assign]
    ask(llm, list(TEXTS))
    assert calls == [None]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("longest", [0, 5])
def test_the_device_works_while_prompts_are_read(policy, longest):
    """The steps are the same as if all had been read before the first."""
    prompts = [{"prompt_token_ids": [3 + i] * (1 + 7 * i % 23)} for i in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    told: list[Any] = []
    for is_early in (False, True):
        llm = make_llm(
            max_num_batched_tokens=16,
            max_num_seqs=5,
            scheduling_policy=policy,
            long_prefill_token_threshold=longest,
            enable_prefix_caching=False,
        )
        if not is_early:
            llm._loop.advance = list  # type: ignore[method-assign]
        plans: list[tuple[list[str], list[int]]] = []
        read: list[int] = []
        execute, reader = llm._worker.execute, llm._reader.read

        def executed(plan, execute=execute, plans=plans, read=read):
            new = [row.request_id for row in plan.new_rows]
            plans.append((new, plan.num_scheduled_tokens.tolist(), len(read)))
            return execute(plan)

        def noted(*args, reader=reader, read=read, **options):
            read.append(1)
            return reader(*args, **options)

        llm._worker.execute, llm._reader.read = executed, noted  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        told.append(([plan[:2] for plan in plans], [o.outputs[0].token_ids for o in outputs]))
        assert (plans[0][2] < len(prompts)) == (is_early and policy == "fcfs")
    assert told[0] == told[1]
