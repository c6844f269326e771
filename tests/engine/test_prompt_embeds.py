"""Embeddings from users: what is read, refused, and answered, offline and across the process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_async_llm import collect, run
from engine.test_llm import TEXTS, expected, folder, ids, make_llm
from safetensors.torch import save
from support.embeds import own_rows
from support.in_process import in_process, is_clean
from support.plain import greedy

from pelton import LLM
from pelton.core.prompt_embeds import PromptEmbeds
from pelton.engine.prompt_embeds import as_prompt_embeds, read_prompt_embeds
from pelton.engine.prompts import PromptReader
from pelton.errors import RequestError

DTYPES = ("float16", "bfloat16", "float32", "float64")


def as_torch(embeds: PromptEmbeds) -> torch.Tensor:
    if embeds.dtype == "bfloat16":
        return torch.from_numpy(embeds.rows.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(embeds.rows.copy())


def convert(given: Any, dtype: str = "float32", is_row: Any = None, max_rows: int = 20) -> Any:
    return as_prompt_embeds(given, is_row, dtype=dtype, hidden_size=4, max_rows=max_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_conversions_are_those_of_torch(given, dtype):
    """Ties, subnormals, signed zeros and all; from tensors, arrays and files."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, 4, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-12, 12, (500, 4), generator=generator)
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 2.0**-24]).double()
    values[:100] = ties * torch.arange(100)[:, None]
    tensor = values.to(getattr(torch, given))
    wanted = tensor.to(getattr(torch, dtype))
    kinds = [tensor, tensor.t().contiguous().t(), read_prompt_embeds(save({"x": tensor}))]
    if given != "bfloat16":
        kinds.append(tensor.numpy())
    for one in kinds:
        found = convert(one, dtype, max_rows=500)
        assert found.dtype == dtype
        bits = torch.int16 if wanted.element_size() == 2 else torch.int32
        assert as_torch(found).view(bits).equal(wanted.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused_naming_the_row(dtype):
    for bad in (float("nan"), float("inf"), -float("inf"), 1e39):
        if dtype == "float64" and bad == 1e39:
            continue
        rows = torch.zeros(5, 4, dtype=torch.float64)
        rows[3, 1] = bad
        with pytest.raises(RequestError, match=f"finite in {dtype}; row 3"):
            convert(rows, dtype)
    # The largest bfloat16 is finite, and half a step above it is not.
    assert convert(torch.full((1, 4), 3.3895e38), "bfloat16")
    with pytest.raises(RequestError, match="row 0"):
        convert(torch.full((1, 4), 3.4e38), "bfloat16")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[1.0]], "tensor or an array, got list"),
        (torch.zeros(2, 3), "4 columns, the model's hidden size, got 3"),
        (torch.zeros(2, 2, 4), r"2 dimensions, \[T, H\], got \[2, 2, 4\]"),
        (torch.zeros(4), "2 dimensions"),
        (torch.zeros(0, 4), "1 to 20 rows .*, got 0"),
        (torch.zeros(21, 4), "1 to 20 rows .*, got 21"),
        (torch.zeros(2, 4, dtype=torch.int32), "got int32"),
        (torch.ones(2, 4).to_sparse(), "dense tensor, got one of layout torch.sparse_coo"),
        (torch.ones(2, 4, device="meta"), "device 'meta'"),
        (
            torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged),
            "dense tensor, got one of layout nested",
        ),
        (torch.zeros(2, 4, dtype=torch.float8_e5m2), "got float8_e5m2"),
        (np.zeros((2, 4), np.complex64), "got complex64"),
        (np.zeros((2, 4), object), "got object"),
    ],
)
def test_refusals(given, says):
    with pytest.raises(RequestError, match=says) as caught:
        convert(given)
    assert caught.value.field == "prompt_embeds"


def test_rows_of_a_mix_may_be_all_or_those_alone():
    is_row = np.array([True, False, True])
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    nan = rows.copy()
    nan[1] = np.nan  # at a token's place: not looked at
    for one in (rows, nan, rows[[0, 2]]):
        assert (convert(one, is_row=is_row).rows == rows[[0, 2]]).all()
    with pytest.raises(RequestError, match=r"3 rows, .*or 2, .*got 1"):
        convert(rows[:1], is_row=is_row)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "too few for a header"),
        (b"\x80\x04pickle" + b"x" * 50, "not a safetensors file"),
        (save({"a": torch.zeros(1, 4), "b": torch.zeros(1, 4)}), "1 tensor, got 2"),
        (save({}), "1 tensor, got 0"),
        (save({"a": torch.zeros(2, 4, dtype=torch.int8)}), "got I8"),
        (save({"a": torch.zeros(8)}), r"got \[8\]"),
        (save({"a": torch.zeros(2, 4)})[:-1], "truncated"),
        (save({"a": torch.zeros(2, 4)}, {"note": "x" * 70_000}), "at most 65536"),
    ],
)
def test_files_that_are_refused(data, says):
    with pytest.raises(RequestError, match=says):
        read_prompt_embeds(data)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(enable_prompt_embeds=True, device="fake", max_num_seqs=4)


def forms_of(text: str) -> list[dict[str, Any]]:
    """A prompt that is the text, in every way that is not text."""
    tokens = ids(text)
    rows = torch.from_numpy(own_rows(folder(), tokens))
    is_token = [place % 3 == 0 for place in range(len(tokens))]
    # What is not looked at may be anything.
    wrong_rows = torch.where(torch.tensor(is_token)[:, None], torch.nan, rows)
    wrong_ids = [token if known else -99 for token, known in zip(tokens, is_token)]
    mix = {"prompt_token_ids": wrong_ids, "prompt_is_token_ids": is_token}
    few = rows[~torch.tensor(is_token)]
    return [
        {"prompt_embeds": rows},
        {"prompt_embeds": rows.numpy()},
        {"prompt_embeds": rows.double()},
        {"prompt_embeds": wrong_rows, **mix},
        {"prompt_embeds": few, **mix},
        {
            "prompt_embeds": rows,
            "prompt_token_ids": tokens,
            "prompt_is_token_ids": [True] * len(tokens),
        },
    ]


def test_every_form_is_the_text(llm):
    prompts = [(text, prompt) for text in TEXTS for prompt in (text, *forms_of(text))]
    outputs = llm.generate([prompt for _, prompt in prompts], greedy(), use_tqdm=False)
    for (text, prompt), output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == expected(text, greedy())
        if isinstance(prompt, str):
            answer = output.outputs[0].text
            assert output.prompt_token_ids == ids(text)
            continue
        assert output.outputs[0].text == answer
        assert output.prompt is None
        is_token = prompt.get("prompt_is_token_ids", [False] * len(ids(text)))
        shown = [token if known else -1 for token, known in zip(ids(text), is_token)]
        assert output.prompt_token_ids == shown


def test_several_answers(llm):
    (output,) = llm.generate(
        {"prompt_embeds": forms_of(TEXTS[1])[0]["prompt_embeds"]},
        greedy(n=3, logprobs=2),
        use_tqdm=False,
    )
    assert [one.token_ids for one in output.outputs] == [expected(TEXTS[1], greedy())] * 3


def test_across_the_process_and_nothing_is_kept(llm):
    """The API process lets go of the embeddings when they are sent."""

    async def main() -> None:
        served = in_process(llm)
        for text in TEXTS:
            for prompt in forms_of(text):
                stream = served.generate(prompt, greedy(n=2), request_id="r")
                first = await anext(stream)
                assert served._streams["r"].request.prompt_embeds is None
                answer = list(first.outputs[0].token_ids)
                async for delta in stream:
                    for output in delta.outputs:
                        if output.index == 0:
                            answer += output.token_ids
                assert answer == expected(text, greedy())
                is_token = prompt.get("prompt_is_token_ids", [False] * len(ids(text)))
                shown = [token if known else -1 for token, known in zip(ids(text), is_token)]
                assert first.prompt_token_ids.tolist() == shown
        assert is_clean(served)

    run(main)


MIX = forms_of("water and light")[3]


@pytest.mark.parametrize(
    ("prompt", "field", "says"),
    [
        ({**MIX, "prompt_is_token_ids": None}, "prompt_is_token_ids", "needs prompt_token_ids"),
        ({**MIX, "prompt_token_ids": None}, "prompt_is_token_ids", "needs prompt_token_ids"),
        ({**MIX, "prompt_is_token_ids": [True]}, "prompt_is_token_ids", "booleans"),
        ({**MIX, "prompt_is_token_ids": [1] * 99}, "prompt_is_token_ids", "booleans"),
        ({**MIX, "prompt_token_ids": [[1]]}, "prompt_token_ids", "list of integers"),
        (
            {**MIX, "prompt_token_ids": [-1, *MIX["prompt_token_ids"][1:]]},
            "prompt_token_ids",
            "negative where",
        ),
        (
            {**MIX, "prompt_token_ids": [10**6, *MIX["prompt_token_ids"][1:]]},
            "prompt_token_ids",
            "got 1000000",
        ),
        ({"prompt": "x", "prompt_is_token_ids": [True]}, "prompt_is_token_ids", "there are none"),
        ({"prompt_embeds": torch.zeros(96, 48)}, "prompt_embeds", "1 to 95 rows"),
        ({"prompt_embeds": torch.zeros(3, 40)}, "prompt_embeds", "48 columns"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "got str"),
        ({"prompt_embeds": torch.zeros(3, 48), "prompt": 5}, "prompt", "exclude each other"),
        ({"prompt_embeds": torch.zeros(3, 48), "prompt": ""}, "prompt", "exclude each other"),
        ({**MIX, "prompt": "x"}, "prompt", "exclude each other"),
        (
            {**MIX, "prompt_is_token_ids": [[True], [True, False]]},
            "prompt_is_token_ids",
            "booleans",
        ),
        (
            {**MIX, "prompt_is_token_ids": torch.ones(3, dtype=torch.bool, device="meta")},
            "prompt_is_token_ids",
            "booleans",
        ),
        (
            {**MIX, "prompt_token_ids": torch.ones(3, dtype=torch.int32).to_sparse()},
            "prompt_token_ids",
            "list of integers",
        ),
        ({"prompt_token_ids": torch.ones(3, device="meta")}, "prompt_token_ids", "list of"),
        ({"prompt_token_ids": [5, 10**30]}, "prompt_token_ids", f"to 2147483647, got {10**30}"),
        ({"prompt_token_ids": [5, "x"]}, "prompt_token_ids", "integers, got 'x' at place 1"),
        ({"prompt_token_ids": [float("nan")]}, "prompt_token_ids", "integers, got nan at place"),
        ({"prompt_token_ids": [5, None]}, "prompt_token_ids", "integers, got None at place 1"),
    ],
)
def test_bad_prompts(prompt, field, says, llm):
    good = {"prompt_embeds": torch.from_numpy(own_rows(folder(), ids(TEXTS[0])))}
    bad, fine = llm.generate([prompt, good], greedy(), use_tqdm=False)
    assert isinstance(bad.error, RequestError)
    assert says in str(bad.error)
    assert bad.error.field == field
    assert fine.outputs[0].token_ids == expected(TEXTS[0], greedy())


def test_prompt_logprobs_are_refused_where_the_user_is(llm):
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate(MIX, greedy(prompt_logprobs=1), use_tqdm=False)

    async def main() -> None:
        served = in_process(llm)
        with pytest.raises(RequestError, match="prompt_logprobs"):
            await collect(served, prompt=MIX, options=greedy(prompt_logprobs=1))
        assert is_clean(served)

    run(main)


def test_an_engine_without_them_names_the_option():
    reader = PromptReader(replace(make_llm().config, enable_prompt_embeds=False), None)
    with pytest.raises(RequestError, match="enable_prompt_embeds=True") as caught:
        reader.read("r", MIX, greedy())
    assert caught.value.field == "prompt_embeds"
