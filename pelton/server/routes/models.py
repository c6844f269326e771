"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from pelton.server.endpoint import Answer, Call
from pelton.server.protocol import ModelCard, ModelList
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes


async def list_models(state: ServerState, call: Call) -> Answer:
    """The names that this server answers to; they all mean the same model."""
    return Answer(json_bytes(ModelList(data=[_card(state, name) for name in state.names])))


async def show_model(state: ServerState, call: Call) -> Answer:
    """One of the names."""
    name = call.request.path_params["name"]
    state.service.check_model(name)
    return Answer(json_bytes(_card(state, name)))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=state.created, root=state.root, max_model_len=state.max_model_len
    )
