"""Self-attention of a decoder layer: three calls."""

from __future__ import annotations

from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV, page_bytes_of, scale_dtype_of
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.joint_qk_norm import JointQKNorm
from pelton.layers.linear import LinearAdd, NormLinear, vector
from pelton.layers.parameter import Parameter, Part, PartName, shard
from pelton.ops.paged_attention import AttentionSignature


def qkv_parts(build: BuildContext, config: ModelConfig) -> dict[PartName, Part]:
    """This rank's heads of the three products, one behind the other."""
    parts: dict[PartName, Part] = {}
    offset = 0
    for name, heads in (
        ("q", config.num_heads),
        ("k", config.num_kv_heads),
        ("v", config.num_kv_heads),
    ):
        part = shard(
            (heads * config.head_dim, config.hidden_size),
            build.rank,
            build.size,
            unit=config.head_dim,
            dst_start=offset,
            may_replicate=name != "q",
        )
        parts[name] = part
        offset += part.dst_size
    return parts


class SelfAttention:
    """norm, qkv, rotation, paged attention and output product into the residual stream.

    window: tokens that the layer sees, the query included, or None for all.
    """

    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        parts = qkv_parts(build, config)
        self.qkv = NormLinear(
            build,
            hidden,
            parts,
            norm_eps=config.rms_norm_eps if config.pre_norms else None,
            has_bias=config.attention_bias or config.qkv_bias,
        )
        self.out = LinearAdd(
            build,
            config.num_heads * head_dim,
            hidden,
            unit=head_dim,
            has_bias=config.attention_bias,
            post_norm_eps=config.rms_norm_eps if config.post_norms else None,
            multiplier=config.residual_multiplier,
        )
        self.norms: dict[str, Parameter] = {}
        if config.qk_norm:
            self.norms = {name: vector(build, head_dim) for name in ("q_norm", "k_norm")}
        self.joint_norm = JointQKNorm(build, config) if config.joint_qk_norm else None
        self.sinks: Parameter | None = None
        if config.attention_sinks:
            part = shard((config.num_heads,), build.rank, build.size)
            self.sinks = Parameter(build.weight(part.size), {None: part})
        is_window = config.layer_kind(index) == "window"
        self.window = config.window if is_window else None
        # The model state has a table for local_rope behind the main one.
        self._rope = int(is_window and config.local_rope is not None)
        self.num_heads = config.num_heads // build.size
        self.num_kv_heads = parts["k"].size // head_dim
        self._index = index
        self._build = build
        self._signature = AttentionSignature(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            scale=config.attention_scale or head_dim**-0.5,
            dtype=build.dtype,
            device_type=build.device.type,
            window=self.window,
            softcap=config.attention_softcap,
            has_sinks=config.attention_sinks,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            kv_codes=build.kv_codes,
        )

    def kv_spec(self, block_size: int) -> LayerKV:
        heads, head_dim = self.num_kv_heads, self._signature.head_dim
        dtype = str(self._build.kv_codes or self._build.dtype).removeprefix("torch.")
        return LayerKV(
            index=self._index,
            num_kv_heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            page_bytes=page_bytes_of(
                dtype, block_size=block_size, num_kv_heads=heads, head_dim=head_dim
            ),
            dtype=dtype,
            scale_dtype=scale_dtype_of(dtype),
            kind="full" if self.window is None else "window",
            window=self.window,
            sharding=(self._build.rank, self._build.size),
        )

    def widths(self) -> dict[str, int]:
        """Columns that this layer needs of step buffers, by name."""
        return {
            "qkv": self.qkv.out_features,
            "attention": self.num_heads * self._signature.head_dim,
        }

    def bind(self) -> None:
        self.qkv.bind()
        self.out.bind()
        weights = {name: norm.tensor for name, norm in self.norms.items()}
        if self.sinks is not None:
            weights["sinks"] = self.sinks.tensor
        self.attend = self._build.backend.bind(self._signature, **weights)

    def run(self, ctx: StepContext) -> None:
        buffers, rope = ctx.buffers, ctx.ropes[self._rope]
        self.qkv.run(ctx.num_tokens, buffers.hidden, buffers.qkv, buffers.qkv)
        if self.joint_norm is not None:
            self.joint_norm.run(buffers.qkv, ctx.communicator)
        self.attend(
            ctx.num_tokens,
            buffers.qkv,
            rope.cos,
            rope.sin,
            ctx.kv[self._index],
            ctx.metadata[self._index],
            buffers.attention,
        )
        self.out.run(buffers.attention, ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {
            **self.qkv.parameters(f"{prefix}.qkv", f"{prefix}.input_norm"),
            **{f"{prefix}.{name}.weight": norm for name, norm in self.norms.items()},
            **({} if self.joint_norm is None else self.joint_norm.parameters(prefix)),
            **({} if self.sinks is None else {f"{prefix}.sinks": self.sinks}),
            **self.out.parameters(f"{prefix}.o", f"{prefix}.attention_out_norm"),
        }
