"""A pipeline stage that is not the last."""

from __future__ import annotations

from pelton.device.protocol import Device
from pelton.forward.in_flight import InFlight, Nothing, Sent
from pelton.ops.step_tensors import RowTensors
from pelton.runner.heads.advance import RowAdvance
from pelton.runner.heads.results import NoResult


class RelayHead:
    """Its rows advance by what it has computed. What the last stage makes of them, a token or a
    vector, is nothing to wait for: a plan says what tokens its rows have got (known_tokens)."""

    def __init__(self, device: Device, rows: RowTensors, *, max_rows: int) -> None:
        self._advance = RowAdvance(device, rows, max_rows=max_rows)

    def run(self, in_flight: InFlight) -> NoResult:
        if not isinstance(in_flight, Nothing):
            assert isinstance(in_flight, Sent)
            self._advance.launch(in_flight.batch)
        return NoResult(in_flight.step_id, 1, in_flight.failed)
