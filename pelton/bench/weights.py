"""The plain loop's weights: the engine's checkpoint and loader, whole tensors."""

from __future__ import annotations

import torch

from pelton.bench.baseline import PlainLoop
from pelton.bench.machine import torch_device
from pelton.checkpoint.source import resolve_checkpoint
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.model import ModelConfig
from pelton.errors import UnsupportedError
from pelton.layers.parameter import Parameter, whole
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF
from pelton.weights.loader import load_weights
from pelton.weights.source import open_source

_RULES = {"safetensors": LLAMA_HF, "gguf": LLAMA_GGUF}


def load_plain_loop(args: EngineArgs, config: EngineConfig) -> PlainLoop:
    """The plain loop with the weights of `args.model`, in the engine's dtype on its device.

    The engine's own tensors stay its own (it may have packed them), so the weights are in memory
    twice. Raises UnsupportedError for a model that the loop does not know.
    """
    if config.model.architecture != "LlamaForCausalLM":
        raise UnsupportedError(
            f"the baseline knows LlamaForCausalLM only, not {config.model.architecture}; run "
            "without --baseline."
        )
    checkpoint = resolve_checkpoint(
        args.model, revision=args.revision, token=args.hf_token, load_format=args.load_format
    )
    parameters = plain_parameters(
        config.model, getattr(torch, config.dtype), torch_device(config.device)
    )
    rules = _RULES[checkpoint.format]
    source = open_source(checkpoint, parameters, rules, seed=config.seed)
    load_weights(parameters, source, rules, head_dim=config.model.head_dim)
    weights = {name: parameter.tensor for name, parameter in parameters.items()}
    return PlainLoop(config.model, weights, config.max_model_len)


def plain_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Parameter]:
    """Empty weights of a Llama-shaped model, unsharded, under the names that PlainLoop reads."""
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parameters: dict[str, Parameter] = {}

    def add(name: str, columns: tuple[int, ...], rows: dict[str | None, int]) -> None:
        parts, start = {}, 0
        for part, size in rows.items():
            parts[part] = whole((size, *columns), dst_start=start)
            start += size
        tensor = torch.empty(start, *columns, dtype=dtype, device=device)
        parameters[name] = Parameter(tensor, parts)

    def linear(name: str, columns: int, rows: dict[str | None, int], has_bias: bool) -> None:
        add(f"{name}.weight", (columns,), rows)
        if has_bias:
            add(f"{name}.bias", (), rows)

    add("embed.weight", (c.hidden_size,), {None: c.vocab_size})
    for i in range(c.num_layers):
        layer = f"layers.{i}"
        add(f"{layer}.input_norm.weight", (), {None: c.hidden_size})
        qkv: dict[str | None, int] = {"q": q_size, "k": kv_size, "v": kv_size}
        linear(f"{layer}.qkv", c.hidden_size, qkv, c.attention_bias)
        linear(f"{layer}.o", q_size, {None: c.hidden_size}, c.attention_bias)
        add(f"{layer}.post_norm.weight", (), {None: c.hidden_size})
        gate_up: dict[str | None, int] = {"gate": c.intermediate_size, "up": c.intermediate_size}
        linear(f"{layer}.gate_up", c.hidden_size, gate_up, c.mlp_bias)
        linear(f"{layer}.down", c.intermediate_size, {None: c.hidden_size}, c.mlp_bias)
    add("norm.weight", (), {None: c.hidden_size})
    if not c.tie_word_embeddings:
        add("head.weight", (c.hidden_size,), {None: c.vocab_size})
    return parameters
