"""The other side of a benchmark: a plain eager PyTorch loop over the same weights.

What a competent engineer writes in an hour: contiguous KV, scaled_dot_product_attention, fused QKV
and gate-up products, argmax, nothing else. Rows have equal lengths, so there is no paging, no
scheduling and no padding; what the engine costs on top of it is the engine's overhead.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from pelton.config.model import ModelConfig
from pelton.core.plan import Int32Array
from pelton.errors import UnsupportedError
from pelton.layers.rope import rope_tables


class PlainLoop:
    """A Llama-shaped model and its greedy loop.

    weights: `embed.weight`, `norm.weight`, `head.weight` (absent when tied) and, per layer i,
        `layers.{i}.{input_norm,qkv,o,post_norm,gate_up,down}.weight` and optional `.bias`; linear
        weights are [out, in], qkv stacks q, k, v and gate_up stacks gate, up. One floating dtype,
        one device; neither copied nor changed.
    max_positions: the longest row, prompt and output together, in tokens.

    Raises UnsupportedError for an activation other than SiLU and for partial rotation.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        max_positions: int,
    ) -> None:
        if config.hidden_act != "silu" or config.rope.rotary_dim != config.head_dim:
            raise UnsupportedError(
                "the baseline knows hidden_act='silu' and rotary_dim=head_dim only, the model has "
                f"{config.hidden_act!r} and {config.rope.rotary_dim}; run without --baseline."
            )
        self._config = config
        self._embed = weights["embed.weight"]
        self._head = weights.get("head.weight", self._embed)
        self._norm = weights["norm.weight"]
        self._layers = [_Layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        cos, sin = rope_tables(config.rope, max_positions, self._embed.dtype)
        self._cos = cos.to(self._embed.device)
        self._sin = torch.cat([sin, sin], dim=-1).to(self._embed.device)

    @torch.inference_mode()
    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        """Greedy continuation of `prompts` [B, T] by exactly `output_len` tokens: [B, output_len],
        int32, end tokens ignored."""
        c = self._config
        batch_size, input_len = prompts.shape
        shape = (batch_size, c.num_kv_heads, input_len + output_len, c.head_dim)
        keys = [self._embed.new_empty(shape) for _ in self._layers]
        values = [self._embed.new_empty(shape) for _ in self._layers]
        ids = torch.from_numpy(prompts.astype(np.int64)).to(self._embed.device)
        made = []
        start = 0
        for _ in range(output_len):
            logits = self._forward(ids, start, keys, values)
            start += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True)
            made.append(ids)
        result: Int32Array = torch.cat(made, 1).int().cpu().numpy()
        return result

    def _forward(
        self, ids: torch.Tensor, start: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Logits [B, V] of the last of `ids` [B, T] at positions start..start+T."""
        c = self._config
        num_rows, num_tokens = ids.shape
        end = start + num_tokens
        cos, sin = self._cos[start:end], self._sin[start:end]
        heads = (num_rows, num_tokens, -1, c.head_dim)
        widths = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        x = F.embedding(ids, self._embed)
        for layer, k_cache, v_cache in zip(self._layers, keys, values, strict=True):
            h = F.rms_norm(x, (c.hidden_size,), layer.input_norm, c.rms_norm_eps)
            q, k, v = torch.split(F.linear(h, *layer.qkv), widths, -1)
            k_cache[:, :, start:end] = _rotate(k.view(heads).transpose(1, 2), cos, sin)
            v_cache[:, :, start:end] = v.view(heads).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                _rotate(q.view(heads).transpose(1, 2), cos, sin),
                k_cache[:, :, :end],
                v_cache[:, :, :end],
                is_causal=num_tokens > 1,
                enable_gqa=True,
            )
            x = x + F.linear(attended.transpose(1, 2).flatten(2), *layer.o)
            h = F.rms_norm(x, (c.hidden_size,), layer.post_norm, c.rms_norm_eps)
            gate, up = F.linear(h, *layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, *layer.down)
        return F.linear(
            F.rms_norm(x[:, -1], (c.hidden_size,), self._norm, c.rms_norm_eps), self._head
        )


class _Layer:
    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        def linear(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            return weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias")

        self.input_norm = weights[prefix + "input_norm.weight"]
        self.post_norm = weights[prefix + "post_norm.weight"]
        self.qkv = linear("qkv")
        self.o = linear("o")
        self.gate_up = linear("gate_up")
        self.down = linear("down")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, heads, T, head_dim] by tables [T, head_dim]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
