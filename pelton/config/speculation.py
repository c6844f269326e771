"""How drafts are made, decided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """What `EngineArgs.speculative_config` resolves to; its keys are these names (vLLM's).

    method: a name from pelton/speculation/table.py; of no meaning without drafts.
    num_speculative_tokens: K, most drafts of a request in a step; 0 = no speculation.
    prompt_lookup_min, prompt_lookup_max: "ngram" looks for the longest repeated ending of a text
        that has at least and at most so many tokens.
    """

    method: str = "none"
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
