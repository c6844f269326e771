"""N-gram speculation on real text."""

from __future__ import annotations

from pelton import LLM, SamplingParams

TEXT = (
    "The harbour of Vessel opens at six. Ships that come before six wait outside the harbour of "
    "Vessel. Ships that come after six are led to their place by the harbour master."
)
CHAT = [{"role": "user", "content": "Repeat the following text word for word:\n\n" + TEXT}]


def test_same_text_in_fewer_steps():
    """Bitwise the same arithmetic, so the same text, stop strings inside a block included."""
    made = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 6}):
        llm = LLM(
            num_threads=1,
            max_model_len=256,
            max_num_seqs=1,
            batch_invariant=True,
            enable_prefix_caching=False,
            speculative_config=speculative,
        )
        (whole,) = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        steps = llm._loop.scheduler.stats.num_steps
        params = SamplingParams(temperature=0.0, max_tokens=24, stop="before")
        (cut,) = llm.chat(CHAT, params, use_tqdm=False)
        llm.close()
        made.append((whole.outputs[0].text, whole.outputs[0].token_ids, cut.outputs[0].text, steps))
    (plain, plain_ids, plain_cut, plain_steps), (text, ids, text_cut, steps) = made
    assert (text, list(ids), text_cut) == (plain, list(plain_ids), plain_cut)
    assert "before" in plain
    assert plain_cut == plain[: plain.index("before")]
    assert steps < 0.6 * plain_steps
