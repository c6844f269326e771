"""Prompts of embeddings are pooled like the text that they are of, in one batch with any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compose.test_pooling import FOLDER, KINDS, PROMPTS, expected
from support.embeds import places_of
from support.pooled import embeddings_of
from support.tiny import TinyEngine

from pelton.core.prompt_embeds import PromptEmbeds, placeholders
from pelton.engine.prompts import PromptReader
from pelton.errors import RequestError

MIXED = ("classify", "last", "mean", "tokens", "token classes", "step")
LONG = (2, 4, 5)


def add(engine: TinyEngine, kind: str, index: int, form: str) -> str:
    ids = np.array(PROMPTS[index])
    is_row = places_of(form, len(ids))
    if not is_row.any():
        return engine.add(PROMPTS[index], KINDS[kind])
    rows = embeddings_of(FOLDER(), ids[is_row])
    return engine.add(
        np.where(is_row, placeholders(is_row), ids),
        KINDS[kind],
        prompt_embeds=PromptEmbeds(rows, "float32"),
    )


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_every_form_and_task_in_one_batch(device, chunk):
    engine = TinyEngine(
        FOLDER(),
        device=device,
        runner="auto",
        max_num_seqs=8,
        long_prefill_token_threshold=chunk,
        num_blocks=128,
        enable_prompt_embeds=True,
    )
    names = {
        (kind, index, form): add(engine, kind, index, form)
        for index in LONG
        for kind in MIXED
        for form in ("text", "embeds", "mix")
        # A method that needs ids is refused by the front end where there are none.
        if form == "text" or kind != "step"
    }
    outcomes = engine.run()
    for (kind, index, form), name in names.items():
        assert outcomes[name].error is None
        np.testing.assert_allclose(
            outcomes[name].pooled,
            expected(kind, index),
            rtol=1e-4,
            atol=1e-5,
            err_msg=f"{kind} {index} {form}",
        )


def test_who_needs_ids_refuses_embeddings():
    engine = TinyEngine(FOLDER(), runner="auto", enable_prompt_embeds=True)
    reader = PromptReader(engine.config, None)
    rows = embeddings_of(FOLDER(), PROMPTS[2])
    with pytest.raises(RequestError, match="needs the ids of all tokens") as caught:
        reader.read_pooled("a", {"prompt_embeds": rows}, KINDS["step"])
    assert caught.value.field == "prompt_embeds"
    for kind in KINDS:
        if not kind.startswith("step"):
            request, _ = reader.read_pooled("a", {"prompt_embeds": rows}, KINDS[kind])
            assert request.prompt_embeds is not None
    params = replace(KINDS["last"], truncate_prompt_tokens=3)
    with pytest.raises(RequestError, match="cuts text and token ids"):
        reader.read_pooled("a", {"prompt_embeds": rows}, params)
