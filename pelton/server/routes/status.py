"""GET /health, /version, /load and /metrics."""

from __future__ import annotations

import pelton
from pelton.metrics.prometheus import CONTENT_TYPE
from pelton.server.endpoint import Answer, Call
from pelton.server.errors import unavailable
from pelton.server.protocol import Health, Load, Version
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes


async def health(state: ServerState, call: Call) -> Answer:
    """200 while the engine runs, 503 when it has died."""
    if not state.engine.is_alive:
        raise unavailable("The engine has stopped.")
    return Answer(json_bytes(Health()))


async def version(state: ServerState, call: Call) -> Answer:
    """Pelton's version."""
    return Answer(json_bytes(Version(pelton.__version__)))


async def load(state: ServerState, call: Call) -> Answer:
    """Requests in flight and queued, now."""
    stats = state.engine.stats()
    return Answer(
        json_bytes(
            Load(
                server_load=state.in_flight.now,
                num_requests_running=stats.scheduler.num_running,
                num_requests_waiting=stats.num_queued,
            )
        )
    )


async def metrics(state: ServerState, call: Call) -> Answer:
    """Numbers for Prometheus, in its text format."""
    return Answer(state.metrics.expose(), content_type=CONTENT_TYPE)
