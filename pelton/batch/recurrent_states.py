"""What recurrent layers remember of each row, in fixed device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pelton.core.kv.spec import LayerKV, RecurrentSpec
from pelton.device.protocol import Device


@dataclass(frozen=True, slots=True)
class RecurrentTensors:
    """One layer's states, views of `raw`. ssm, conv: [R, 1 + K, *shape of one state].
    raw: [R, 1 + K, state_bytes] uint8, contiguous."""

    ssm: torch.Tensor
    conv: torch.Tensor
    raw: torch.Tensor


class RecurrentStates:
    """A ring of 1 + K states per row and recurrent layer; K drafts may turn out wrong.

    The state after a row's position p lies at index p % (1 + K). A step that starts at position p
    reads index (p - 1) % (1 + K), or zeros if p is 0, so nothing is cleared when a row changes
    hands. It leaves the states after each of its last 1 + K positions, so nothing is rolled back
    either: after rejected drafts the next step starts at the position that was accepted.

    Without recurrent layers there is no memory behind it.

    Args:
        layers: all layers of the model; those of kind "recurrent" have states.
        num_rows: rows of state, reserved ones included.
    """

    def __init__(
        self, device: Device, layers: Sequence[LayerKV], *, num_rows: int, num_drafts: int
    ) -> None:
        self.ring = 1 + num_drafts
        self._by_layer = {
            layer.index: _allocate(device, layer.recurrent, num_rows, self.ring)
            for layer in layers
            if layer.recurrent is not None
        }

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """LayerKV.index of the recurrent layers, ascending."""
        return tuple(sorted(self._by_layer))

    @property
    def bytes_per_row(self) -> int:
        """Over all layers and the whole ring."""
        return sum(self.ring * tensors.raw.shape[2] for tensors in self._by_layer.values())

    def tensors(self, layer_index: int) -> RecurrentTensors:
        return self._by_layer[layer_index]


def _allocate(device: Device, spec: RecurrentSpec, num_rows: int, ring: int) -> RecurrentTensors:
    raw = device.empty((num_rows, ring, spec.state_bytes), torch.uint8)
    conv_end = spec.ssm_bytes + spec.conv_bytes
    return RecurrentTensors(
        ssm=_view(raw[..., : spec.ssm_bytes], spec.ssm_dtype, spec.ssm_shape),
        conv=_view(raw[..., spec.ssm_bytes : conv_end], spec.conv_dtype, spec.conv_shape),
        raw=raw,
    )


def _view(raw: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return raw.view(getattr(torch, dtype)).view(*raw.shape[:2], *shape)
