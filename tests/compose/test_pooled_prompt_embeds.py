"""Pooling with embeddings: those of the model's own table are pooled as the text is, beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.embeds import FORMS, as_form, own_rows, places_of
from support.families import tiny_model
from support.in_process import in_process, is_clean
from support.plain import greedy
from support.pooled import cosine, tiny_pooled
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton import LLM
from pelton.config.pooling import PoolingParams
from pelton.core.prompt_embeds import PromptEmbeds, placeholders
from pelton.errors import RequestError

PROMPTS = prompts_of([1, 3, 8, 12, 21, 37], seed=11)
TAG = 7
for _prompt in PROMPTS:
    _prompt[len(_prompt) // 2] = TAG
EMBED: dict[str, PoolingParams] = {
    "last": PoolingParams(),
    "mean": PoolingParams(method="mean", dimensions=20),
    "cls": PoolingParams(method="cls", use_activation=False),
    "all": PoolingParams(task="token_embed"),
    "step": PoolingParams(task="token_embed", method="step", step_tag_id=TAG),
}
CLASSIFY: dict[str, PoolingParams] = {
    "last": PoolingParams(),
    "mean": PoolingParams(method="mean"),
    "all": PoolingParams(task="token_classify"),
}
INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}


def folder_of(kinds: dict[str, PoolingParams]) -> Any:
    return tiny_pooled("Qwen3") if kinds is EMBED else tiny_pooled("Qwen3", "classify")


def engine_of(kinds: dict[str, PoolingParams], device: str = "fake", **changes: Any) -> TinyEngine:
    return TinyEngine(
        folder_of(kinds),
        device=device,
        runner="auto",
        enable_prompt_embeds=True,
        max_num_seqs=6,
        num_blocks=600,
        **changes,
    )


def served(kinds: dict[str, PoolingParams], engine: TinyEngine) -> dict[str, PoolingParams]:
    """Those of the kinds that the model is for."""
    return {name: params for name, params in kinds.items() if _is_served(params, engine)}


def _is_served(params: PoolingParams, engine: TinyEngine) -> bool:
    return params.task is None or params.task in engine.config.pooling.tasks


def add(engine: TinyEngine, prompt: list[int], params: PoolingParams, form: str) -> str:
    given = as_form(tiny_model("Qwen3"), prompt, places_of(form, len(prompt)))
    return engine.add(params=params, **given)


def text_results(kinds: dict[str, PoolingParams], **changes: Any) -> dict[tuple[int, str], Any]:
    """By prompt and kind, each text alone."""
    engine = engine_of(kinds, "cpu", enable_prefix_caching=False, **changes)
    return {
        (i, kind): engine.pool([prompt], params)[0]
        for i, prompt in enumerate(PROMPTS)
        for kind, params in served(kinds, engine).items()
    }


def forms_of(kind: str) -> tuple[str, ...]:
    """Steps are where a token is: their rows have no embeddings, but others beside them have."""
    return ("text",) if kind == "step" else FORMS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"long_prefill_token_threshold": 1, "max_steps_in_flight": 3},
        {"long_prefill_token_threshold": 3, **INVARIANT},
        {"max_num_batched_tokens": 10, "max_steps_in_flight": 1},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 10},
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [EMBED, CLASSIFY], ids=["embed", "classify"])
def test_all_forms_and_kinds_in_one_batch(kinds, changes):
    """Twice, so that the second time prefixes are hit where a method may."""
    expected = text_results(kinds)
    engine = engine_of(kinds, **changes)
    for is_again in (False, True):
        names = {
            add(engine, prompt, params, form): (i, kind)
            for i, prompt in enumerate(PROMPTS)
            for kind, params in served(kinds, engine).items()
            for form in forms_of(kind)
        }
        outcomes = engine.run()
        for name, of in names.items():
            assert outcomes[name].error is None
            assert cosine(outcomes[name].pooled, expected[of]) > 0.9999, (name, of)
            np.testing.assert_allclose(outcomes[name].pooled, expected[of], atol=2e-5)
            if is_again and of == (5, "last") and engine.config.cache.enable_prefix_caching:
                assert outcomes[name].request.num_cached_tokens == 36


def test_bits_are_those_of_the_text():
    expected = text_results(EMBED, **INVARIANT)
    engine = engine_of(EMBED, "queued", long_prefill_token_threshold=5, **INVARIANT)
    names = {
        add(engine, prompt, params, form): (i, kind)
        for i, prompt in enumerate(PROMPTS)
        for kind, params in EMBED.items()
        for form in forms_of(kind)
    }
    outcomes = engine.run()
    for name, of in names.items():
        np.testing.assert_array_equal(outcomes[name].pooled, expected[of], err_msg=str(of))


@pytest.mark.parametrize("form", ["embeds", "mix"])
@pytest.mark.parametrize("kind", ["last", "mean", "all"])
def test_preempted_at_every_step(kind, form):
    expected = text_results(EMBED)
    for k in range(1, 10):
        engine = engine_of(EMBED, long_prefill_token_threshold=3)
        neighbour = add(engine, PROMPTS[2], EMBED["mean"], "mix")
        name = add(engine, PROMPTS[4], EMBED[kind], form)
        for _ in range(k):
            engine.step()
        engine.loop.scheduler.preempt(name)
        outcomes = engine.run()
        assert cosine(outcomes[name].pooled, expected[4, kind]) > 0.9999, k
        assert cosine(outcomes[neighbour].pooled, expected[2, "mean"]) > 0.9999, k


def test_a_row_changes_hands():
    """From embeddings to text while other embeddings are computed, and back."""
    expected = text_results(EMBED)
    engine = engine_of(EMBED, long_prefill_token_threshold=4)
    names = {}
    for index in range(30):
        kind = ("last", "mean", "cls", "all")[index % 4]
        i = index % len(PROMPTS)
        names[add(engine, PROMPTS[i], EMBED[kind], FORMS[index % 3])] = i, kind
    outcomes = engine.run()
    for name, of in names.items():
        assert cosine(outcomes[name].pooled, expected[of]) > 0.9999, of


def test_masks_over_equal_rows_are_told_apart():
    """By a hit of the prefix cache, too."""
    ids = np.array(PROMPTS[4])
    rows = own_rows(tiny_model("Qwen3"), PROMPTS[4])[:, ::-1].copy()
    masks = [np.arange(21) % 2 == 0, np.arange(21) % 2 == 1]

    def pool(engine: TinyEngine, is_row: np.ndarray) -> np.ndarray:
        embeds = PromptEmbeds(rows[is_row], "float32")
        name = engine.add(
            np.where(is_row, placeholders(is_row), ids), EMBED["last"], prompt_embeds=embeds
        )
        return np.array(engine.run()[name].pooled)

    alone = [pool(engine_of(EMBED), mask) for mask in masks]
    assert cosine(*alone) < 0.99
    engine = engine_of(EMBED)
    for mask, expected in [*zip(masks, alone)] * 2:
        assert cosine(pool(engine, mask), expected) > 0.9999


@pytest.fixture(scope="module")
def llm() -> Any:
    llm = LLM(str(tiny_pooled("Qwen3")), num_gpu_blocks_override=64, enable_prompt_embeds=True)
    yield llm
    llm.close()


def test_offline(llm):
    rows = own_rows(tiny_model("Qwen3"), PROMPTS[4])
    is_token = [place % 2 == 0 for place in range(21)]
    prompts = [
        {"prompt_token_ids": PROMPTS[4]},
        {"prompt_embeds": rows},
        {
            "prompt_embeds": rows,
            "prompt_token_ids": PROMPTS[4],
            "prompt_is_token_ids": is_token,
        },
    ]
    text, *others = llm.embed(prompts, use_tqdm=False)
    for output in others:
        assert cosine(np.array(output.outputs.embedding), np.array(text.outputs.embedding)) > 0.9999
    assert others[0].prompt_token_ids == [-1] * 21
    assert others[1].prompt_token_ids == [
        token if known else -1 for token, known in zip(PROMPTS[4], is_token)
    ]


def test_across_the_process(llm):
    """And the API process lets go of the embeddings when they are sent."""
    rows = own_rows(tiny_model("Qwen3"), PROMPTS[4])
    expected = text_results(EMBED)

    async def main() -> None:
        served = in_process(llm)
        for kind in ("last", "mean", "cls", "all"):
            task = asyncio.ensure_future(
                served.pool({"prompt_embeds": rows}, EMBED[kind], request_id="r")
            )
            while "r" not in served._streams:
                await asyncio.sleep(0)
            assert served._streams["r"].request.prompt_embeds is None
            output = await task
            assert cosine(np.array(output.outputs.data), expected[4, kind]) > 0.9999
            assert output.prompt_token_ids == [-1] * 21
        with pytest.raises(RequestError, match="needs the ids of all tokens"):
            await served.pool({"prompt_embeds": rows}, EMBED["step"], request_id="r")
        assert is_clean(served)

    asyncio.run(main())


def test_steps_need_token_ids_and_hurt_nobody_else(llm):
    """Point 4 of the contract: who declares that he needs ids, refuses where the user is."""
    rows = own_rows(tiny_model("Qwen3"), PROMPTS[4])
    prompts = [{"prompt_embeds": rows}] * 2 + [{"prompt_token_ids": PROMPTS[4]}]
    refused, mean, step = llm.encode(
        prompts, [EMBED["step"], EMBED["mean"], EMBED["step"]], use_tqdm=False
    )
    assert isinstance(refused.error, RequestError)
    assert refused.error.field == "prompt_embeds"
    assert "needs the ids of all tokens" in str(refused.error)
    expected = text_results(EMBED)
    assert cosine(mean.outputs.data, expected[4, "mean"]) > 0.9999
    assert cosine(step.outputs.data, expected[4, "step"]) > 0.9999


def test_a_prompt_of_embeddings_may_be_as_long_as_the_context(llm):
    (ids,) = prompts_of([257])
    rows = own_rows(tiny_model("Qwen3"), ids)
    (output,) = llm.embed({"prompt_embeds": rows[:256]}, use_tqdm=False)
    (text,) = llm.embed({"prompt_token_ids": ids[:256]}, use_tqdm=False)
    assert cosine(np.array(output.outputs.embedding), np.array(text.outputs.embedding)) > 0.9999
    with pytest.raises(RequestError, match=r"1 to 256 rows.*got 257"):
        llm.embed({"prompt_embeds": rows}, use_tqdm=False)
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.embed({"prompt_embeds": rows[:9]}, use_tqdm=False, truncate_prompt_tokens=5)


def test_engines_do_not_mix_what_they_are_for(llm):
    rows = own_rows(tiny_model("Qwen3"), PROMPTS[1])
    with pytest.raises(RequestError, match="runner='generate'"):
        llm.generate({"prompt_embeds": rows}, greedy(), use_tqdm=False)
    generator = LLM(str(tiny_llama()), num_gpu_blocks_override=64, enable_prompt_embeds=True)
    with pytest.raises(RequestError, match="runner='pooling'"):
        generator.embed({"prompt_embeds": rows}, use_tqdm=False)
    generator.close()
