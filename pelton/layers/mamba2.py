"""Mamba 2: a decoder layer that remembers a state of fixed size instead of every token's keys.

Source: arXiv 2405.21060, in the form of Granite 4 and Bamba.
"""

from __future__ import annotations

import torch

from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV, mamba2_state
from pelton.layers.context import BuildContext, Communicator, StepContext
from pelton.layers.linear import LinearAdd, NormLinear
from pelton.layers.parameter import Parameter, Part, PartName, shard
from pelton.ops import causal_conv, gated_norm, selective_scan
from pelton.ops.causal_conv import ConvSignature
from pelton.ops.gated_norm import GatedNormSignature
from pelton.ops.gated_norm.reference import gated, scale
from pelton.ops.registry import bind
from pelton.ops.selective_scan import ScanSignature


class Mamba2:
    """norm and input product, convolution, recurrence, gated norm, output product into the
    residual stream.

    Heads are cut over the ranks, and groups with them; a group whose heads stand on several ranks
    stands on each of these, and its norm is summed over them.
    """

    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        assert config.mamba2 is not None, "a recurrent layer without its configuration"
        self._config = mamba = config.mamba2
        self._build, self._index = build, index
        self._eps = config.rms_norm_eps
        hidden = config.hidden_size
        projected = self._parts(("gate", "x", "B", "C", "dt"), (hidden,))
        self.project = NormLinear(
            build, hidden, projected, norm_eps=self._eps, has_bias=mamba.proj_bias
        )
        convolved = self._parts(("x", "B", "C"), (1, mamba.conv_width))
        self._sizes = [convolved[name].dst_size for name in ("x", "B", "C")]
        channels = sum(self._sizes)
        self.conv_weight = Parameter(build.weight(channels, 1, mamba.conv_width), convolved)
        self.conv_bias = (
            Parameter(build.weight(channels), self._parts(("x", "B", "C"), ()))
            if mamba.conv_bias
            else None
        )
        # Exponents of exponents: not rounded to a short type.
        precise = torch.promote_types(build.dtype, torch.float32)
        per_head = shard((mamba.num_heads,), build.rank, build.size)
        self.per_head = {
            name: Parameter(
                torch.empty(per_head.size, dtype=precise, device=build.device), {None: per_head}
            )
            for name in ("a_log", "d", "dt_bias")
        }
        inner = shard((mamba.inner_size,), build.rank, build.size, unit=mamba.head_dim)
        self.gated_norm = Parameter(build.weight(inner.size), {None: inner})
        self.out = LinearAdd(
            build,
            mamba.inner_size,
            hidden,
            unit=mamba.head_dim,
            has_bias=mamba.proj_bias,
            multiplier=config.residual_multiplier,
        )
        self._num_groups = self._sizes[1] // mamba.state_size

    def _parts(self, names: tuple[str, ...], tail: tuple[int, ...]) -> dict[PartName, Part]:
        """Parts one behind the other; tail: the shape behind their rows."""
        mamba, build = self._config, self._build
        grouped = mamba.num_groups * mamba.state_size
        rows = {
            "gate": (mamba.inner_size, mamba.head_dim),
            "x": (mamba.inner_size, mamba.head_dim),
            "B": (grouped, mamba.state_size),
            "C": (grouped, mamba.state_size),
            "dt": (mamba.num_heads, 1),
        }
        parts: dict[PartName, Part] = {}
        offset = 0
        for name in names:
            size, unit = rows[name]
            part = shard(
                (size, *tail),
                build.rank,
                build.size,
                unit=unit,
                dst_start=offset,
                may_replicate=name in ("B", "C"),
            )
            parts[name] = part
            offset += part.dst_size
        return parts

    def kv_spec(self, block_size: int) -> LayerKV:
        dtype = str(self._build.dtype).removeprefix("torch.")
        return LayerKV(
            index=self._index,
            num_kv_heads=0,
            head_dim=0,
            block_size=block_size,
            page_bytes=0,
            dtype=dtype,
            kind="recurrent",
            sharding=(self._build.rank, self._build.size),
            recurrent=mamba2_state(self._config, dtype, num_ranks=self._build.size),
        )

    def widths(self) -> dict[str, int]:
        """Columns that this layer needs of step buffers, by name."""
        return {
            "projected": self.project.out_features,
            "convolved": sum(self._sizes),
            "scanned": self._sizes[0],
        }

    def bind(self) -> None:
        mamba, build = self._config, self._build
        self.project.bind()
        self.out.bind()
        conv_weights = {"weight": self.conv_weight.tensor[:, 0]}
        if self.conv_bias is not None:
            conv_weights["bias"] = self.conv_bias.tensor
        self.convolve = bind(
            "causal_conv",
            causal_conv.CANDIDATES,
            ConvSignature(
                channels=sum(self._sizes),
                width=mamba.conv_width,
                dtype=build.dtype,
                device_type=build.device.type,
                batch_invariant=build.batch_invariant,
            ),
            **conv_weights,
        )
        self.scan = bind(
            "selective_scan",
            selective_scan.CANDIDATES,
            ScanSignature(
                num_heads=len(self.per_head["d"].tensor),
                head_dim=mamba.head_dim,
                num_groups=self._num_groups,
                state_size=mamba.state_size,
                dt_limits=mamba.dt_limits,
                dtype=build.dtype,
                device_type=build.device.type,
                batch_invariant=build.batch_invariant,
            ),
            **{name: parameter.tensor for name, parameter in self.per_head.items()},
        )
        self._norm_signature = GatedNormSignature(
            num_groups=self._num_groups,
            group_size=self._sizes[0] // self._num_groups,
            eps=self._eps,
            dtype=build.dtype,
            device_type=build.device.type,
            batch_invariant=build.batch_invariant,
        )
        self.gate = bind(
            "gated_norm",
            gated_norm.CANDIDATES,
            self._norm_signature,
            weight=self.gated_norm.tensor,
        )

    def run(self, ctx: StepContext) -> None:
        buffers, num_tokens = ctx.buffers, ctx.num_tokens
        metadata, states = ctx.metadata[self._index], ctx.states.tensors(self._index)
        self.project.run(num_tokens, buffers.hidden, buffers.projected, buffers.projected)
        inner, channels = self._sizes[0], sum(self._sizes)
        num_heads = buffers.projected.shape[1] - inner - channels
        gate, mixed, dt = torch.split(buffers.projected, [inner, channels, num_heads], dim=1)
        self.convolve(num_tokens, mixed, states.conv, metadata, buffers.convolved)
        x, b, c = torch.split(buffers.convolved, self._sizes, dim=1)
        self.scan(num_tokens, x, dt, b, c, states.ssm, metadata, buffers.scanned)
        if self._config.num_groups < self._build.size:
            self._norm_of_shared_group(buffers.scanned, gate, ctx.communicator)
        else:
            self.gate(num_tokens, buffers.scanned, gate)
        self.out.run(buffers.scanned, ctx)

    def _norm_of_shared_group(
        self, x: torch.Tensor, gate: torch.Tensor, communicator: Communicator
    ) -> None:
        """gated_norm where this rank's one group stands on others, too."""
        values = gated(self._norm_signature, x, gate)
        squares = values.square().sum(-1)
        num_groups = self._config.num_groups
        group = self._build.rank // (self._build.size // num_groups)
        of_all = squares.new_zeros((len(x), num_groups))
        of_all[:, group] = squares[:, 0]
        communicator.all_reduce(of_all)
        size = self._config.inner_size // num_groups
        squares = of_all[:, group, None]
        scale(self._norm_signature, values, squares, size, self.gated_norm.tensor, x)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        own = f"{prefix}.mamba"
        named = {
            **self.project.parameters(f"{own}.project", f"{prefix}.input_norm"),
            f"{own}.conv.weight": self.conv_weight,
            **{f"{own}.{name}": parameter for name, parameter in self.per_head.items()},
            f"{own}.gated_norm.weight": self.gated_norm,
            **self.out.parameters(f"{own}.out"),
        }
        if self.conv_bias is not None:
            named[f"{own}.conv.bias"] = self.conv_bias
        return named
