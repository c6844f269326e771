"""Encoders with embeddings of their own words: the text's vectors, and transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.embeds import FORMS, places_of
from support.encoders import both_ways, texts_of, tiny_encoder, transformers_model
from support.tiny import TinyEngine

from pelton.config.pooling import PoolingParams
from pelton.core.prompt_embeds import PromptEmbeds, placeholders

FAMILIES = {
    "bert": lambda: tiny_encoder("Bert"),
    "roberta": lambda: tiny_encoder("Roberta", type_vocab_size=1),
    "modernbert": lambda: tiny_encoder("ModernBert", local_attention=12),
    "llama": lambda: both_ways("Llama"),
}
TASKS = {
    "tokens": PoolingParams(task="token_embed", use_activation=False),
    "mean": PoolingParams(task="embed", method="mean"),
    "cls": PoolingParams(task="embed", method="cls", dimensions=7),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_words_as_embeddings_are_the_text(family):
    """All forms and tasks in one batch, and preempted, with batch_invariant: the same bits."""
    folder, texts = FAMILIES[family](), texts_of([1, 30, 2, 64, 7])
    table = transformers_model(folder).get_input_embeddings().weight.detach().numpy()
    engine = TinyEngine(
        folder,
        device="fake",
        runner="auto",
        enable_prompt_embeds=True,
        max_num_batched_tokens=128,
        batch_invariant=True,
        attention_backend="invariant",
    )
    names = {}
    for form in FORMS:
        for i, text in enumerate(texts):
            is_row = places_of(form, len(text))
            ids = np.array(text)
            given = {}
            if is_row.any():
                given["prompt_embeds"] = PromptEmbeds(table[ids[is_row]], "float32")
                ids = np.where(is_row, placeholders(is_row), ids)
            for task, params in TASKS.items():
                names[engine.add(ids, params, **given)] = form, i, task
    for count in range(12):
        engine.step()
        engine.loop.scheduler.preempt(list(names)[count * 3 % len(names)])
    outcomes = engine.run()
    found = {of: outcomes[name] for name, of in names.items()}
    assert all(outcome.error is None for outcome in found.values())
    for (_, i, task), outcome in found.items():
        np.testing.assert_array_equal(outcome.pooled, found["text", i, task].pooled)


@pytest.mark.parametrize("family", FAMILIES)
def test_nobodys_embeddings_are_those_of_transformers(family):
    folder = FAMILIES[family]()
    model = transformers_model(folder)
    rows = torch.randn(17, 48, generator=torch.Generator().manual_seed(5)) * 0.3
    with torch.no_grad():
        if family == "llama":
            everyone = torch.zeros(1, 1, 17, 17)
            states = model(inputs_embeds=rows[None], attention_mask=everyone).last_hidden_state[0]
        else:
            states = model(inputs_embeds=rows[None]).last_hidden_state[0]
    engine = TinyEngine(folder, runner="auto", enable_prompt_embeds=True)
    embeds = PromptEmbeds(rows.numpy(), "float32")
    name = engine.add(placeholders(np.ones(17, np.bool_)), TASKS["tokens"], prompt_embeds=embeds)
    np.testing.assert_allclose(engine.run()[name].pooled, states.numpy(), rtol=1e-4, atol=1e-4)
