"""Self-attention of a decoder layer: three calls."""

from __future__ import annotations

import torch

from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.linear import LinearAdd, NormLinear
from pelton.layers.parameter import Parameter, Part, PartName, shard
from pelton.ops.paged_attention import AttentionSignature


class SelfAttention:
    """norm, qkv, rotation, paged attention and output product into the residual stream."""

    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        parts: dict[PartName, Part] = {}
        offset = 0
        for name, heads in (
            ("q", config.num_heads),
            ("k", config.num_kv_heads),
            ("v", config.num_kv_heads),
        ):
            part = shard(
                (heads * head_dim, hidden),
                build.rank,
                build.size,
                unit=head_dim,
                dst_start=offset,
                may_replicate=name != "q",
            )
            parts[name] = part
            offset += part.dst_size
        self.qkv = NormLinear(
            build,
            hidden,
            parts,
            norm_eps=config.rms_norm_eps,
            has_bias=config.attention_bias,
        )
        self.out = LinearAdd(
            build,
            config.num_heads * head_dim,
            hidden,
            unit=head_dim,
            has_bias=config.attention_bias,
        )
        self.num_heads = config.num_heads // build.size
        self.num_kv_heads = parts["k"].size // head_dim
        self._index = index
        self._build = build
        self._signature = AttentionSignature(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dtype=build.dtype,
            device_type=build.device.type,
        )

    def kv_spec(self, block_size: int) -> LayerKV:
        heads, head_dim = self.num_kv_heads, self._signature.head_dim
        element = torch.empty((), dtype=self._build.dtype).element_size()
        return LayerKV(
            index=self._index,
            num_kv_heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            page_bytes=2 * block_size * heads * head_dim * element,
            dtype=str(self._build.dtype).removeprefix("torch."),
            sharding=(self._build.rank, self._build.size),
        )

    def bind(self) -> None:
        self.qkv.bind()
        self.out.bind()
        self._attend = self._build.backend.kernel(self._signature)

    def run(self, ctx: StepContext) -> None:
        buffers = ctx.buffers
        self.qkv.run(ctx.num_tokens, buffers.hidden, buffers.qkv, buffers.qkv)
        self._attend(
            buffers.qkv,
            ctx.rope.cos,
            ctx.rope.sin,
            ctx.kv[self._index],
            ctx.metadata[self._index],
            buffers.attention,
        )
        self.out.run(buffers.attention, buffers.hidden, ctx.communicator)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {
            **self.qkv.parameters(f"{prefix}.qkv", f"{prefix}.input_norm"),
            **self.out.parameters(f"{prefix}.o"),
        }
