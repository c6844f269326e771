"""What synthetic rows ask of the head, so that nothing of it is met for the first time later."""

from __future__ import annotations

from pelton.config.engine import EngineConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams

Params = SamplingParams | PoolingParams


def first_params(config: EngineConfig) -> tuple[Params, ...]:
    """What most requests ask."""
    if config.pools:
        return (_pooled(config, 0), _pooled(config, -1))
    return SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


def costly_params(config: EngineConfig) -> Params:
    """What takes the head most memory and kernels."""
    if config.pools:
        return _pooled(config, -1)
    return SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        presence_penalty=0.5,
        logprobs=min(config.max_logprobs, config.model.vocab_size),
    )


def other_params(config: EngineConfig) -> tuple[Params, ...]:
    """With `costly_params` all that takes kernels of its own in the head: of the sampler greedy
    rows, many candidates, the whole vocabulary, and few log-probabilities."""
    if config.pools:
        return (_pooled(config, 0),)
    few = min(2, config.max_logprobs, config.model.vocab_size)
    return (
        SamplingParams(
            temperature=0.0, presence_penalty=0.5, logit_bias={0: 1.0}, min_tokens=1, logprobs=0
        ),
        SamplingParams(temperature=1.0, top_k=100, min_p=0.1, logprobs=few),
        SamplingParams(temperature=1.0, top_p=0.9),
    )


def _pooled(config: EngineConfig, task: int) -> PoolingParams:
    """One of the engine's tasks; the last is of tokens."""
    return config.pooling.complete(PoolingParams(task=config.pooling.tasks[task]))
