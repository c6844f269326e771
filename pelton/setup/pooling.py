"""Whether an engine generates or pools, and how. No torch."""

from __future__ import annotations

from pelton.checkpoint.sentence_transformers import read_sentence_modules
from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineArgs
from pelton.config.model import ModelConfig
from pelton.config.pooling import PoolingConfig, Task
from pelton.errors import CheckpointError, UnsupportedError

_TASKS: dict[str, tuple[Task, ...]] = {
    "": ("embed", "token_embed"),
    "text": ("classify", "token_classify", "embed", "token_embed"),
    "token": ("token_classify", "embed", "token_embed"),
}


def decide_pooling(args: EngineArgs, checkpoint: Checkpoint, model: ModelConfig) -> PoolingConfig:
    """How the engine pools; without tasks it generates.

    Raises UnsupportedError for what cannot be had together.
    """
    modules = read_sentence_modules(checkpoint) if args.runner != "generate" else None
    if args.runner == "generate" and model.is_bidirectional:
        raise UnsupportedError(
            f"runner='generate': tokens of {checkpoint.name!r} see those behind them (is_causal is "
            "false), so that it generates none; leave runner at 'auto', which pools it."
        )
    generates = model.has_lm_head and not model.is_bidirectional and not modules
    if args.runner == "generate" or (args.runner == "auto" and generates):
        if not model.has_lm_head:
            raise UnsupportedError(
                f"runner='generate': {checkpoint.name!r} has no head for tokens; leave runner at "
                "'auto', which pools it."
            )
        return PoolingConfig()
    if args.speculative_config is not None:
        raise UnsupportedError(
            "speculative_config is for tokens, and a pooling engine yields none; leave it out."
        )
    projections = modules.projections if modules else ()
    size = model.hidden_size
    for one in projections:
        if one.in_features != size:
            raise CheckpointError(
                f"{one.file}: in_features must be {size}, the size of what comes before it, got "
                f"{one.in_features}."
            )
        size = one.out_features
    return PoolingConfig(
        tasks=_TASKS[model.classifier],
        method=modules.method if modules else model.pooling_method,
        # As sentence-transformers and vLLM have it: vectors of length 1 unless the files differ.
        normalises=modules.normalises if modules else True,
        activation=model.label_activation,
        projections=projections,
        embedding_size=size,
        dimensions=min(size, modules.dimensions) if modules and modules.dimensions else None,
        similarity=modules.similarity if modules else "cosine",
        num_labels=model.num_labels,
        max_prompt_tokens=modules.max_prompt_tokens if modules else None,
    )
