"""The OpenAPI document, made of the types that requests and answers are read and written with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

import pelton
from pelton.config.docs import field_texts
from pelton.config.params import SamplingParams
from pelton.server.errors import ErrorAnswer
from pelton.server.protocol import UNSUPPORTED, ChatBody, StreamOptions

_JSON = "application/json"
_ERRORS_OF_ALL = (400, 500, 503)
_ERRORS_OF_BODIES = (404, 408, 413, 415)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An endpoint. body, answer: what it reads and writes, a type or another content type than
    JSON. aliases: other paths to it. streams: whether it may answer with events instead, each of
    type `streams`. needs_key: whether API keys guard it. is_work: whether it is what the model is
    there for, which is counted."""

    method: str
    path: str
    handler: Callable[..., Any]
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    streams: type[msgspec.Struct] | None = None
    needs_key: bool = False
    is_work: bool = False
    aliases: tuple[str, ...] = ()


def openapi_document(operations: Sequence[Operation], *, root_path: str = "") -> dict[str, Any]:
    """As OpenAPI 3.1 (openapis.org) has it."""
    types: list[Any] = [ErrorAnswer]
    for operation in operations:
        found = (operation.body, operation.answer, operation.streams)
        types += [kind for kind in found if isinstance(kind, type)]
    unique = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    references = dict(zip(unique, schemas))
    bodies = (operation.body for operation in operations if operation.body is not None)
    kinds: set[type[msgspec.Struct]] = {StreamOptions, *bodies}
    for kind in kinds:
        _describe(components[kind.__name__], field_texts(kind))
    for schema in components.values():
        _tell_unsupported(schema)
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _operation(operation, references)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
        for number, alias in enumerate(operation.aliases, start=2):
            # An operation's id stands for one path.
            other = {**described, "operationId": f"{described['operationId']}_{number}"}
            other["description"] = f"The same as {operation.path}."
            paths.setdefault(alias, {})[operation.method.lower()] = other
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pelton",
            "version": pelton.__version__,
            "description": "A model, by OpenAI's API with vLLM's extra fields.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    return document


def _describe(schema: dict[str, Any], texts: Mapping[str, str]) -> None:
    """Each field of a body in the words of its docstring, or of the types it shares some with."""
    shared = field_texts(SamplingParams) | field_texts(ChatBody)
    for name, property_schema in schema.get("properties", {}).items():
        text = texts.get(name) or shared.get(name)
        if text is not None:
            property_schema.setdefault("description", text)


def _tell_unsupported(schema: dict[str, Any]) -> None:
    for name, property_schema in schema.get("properties", {}).items():
        if schema.get("additionalProperties") is False and name in UNSUPPORTED:
            rule = UNSUPPORTED[name]
            property_schema["enum"] = list(rule.neutral)
            property_schema["description"] = f"Not supported: {rule.hint}."


def _operation(operation: Operation, references: dict[Any, Any]) -> dict[str, Any]:
    words = inspect.getdoc(operation.handler) or ""
    answer = operation.answer
    if isinstance(answer, str):
        content: dict[str, Any] = {answer: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": references[answer]}}
    if operation.streams is not None:
        name = operation.streams.__name__
        # No type: what a reader of events is to make of them, OpenAPI 3.1 cannot say.
        content["text/event-stream"] = {
            "schema": {"description": f"Events that hold a {name} each."}
        }
    errors = [*_ERRORS_OF_ALL]
    if operation.body is not None:
        errors += _ERRORS_OF_BODIES
    if operation.needs_key:
        errors.append(401)
    if "{" in operation.path and 404 not in errors:
        errors.append(404)
    described: dict[str, Any] = {
        "summary": words.partition("\n")[0],
        "operationId": operation.handler.__name__,
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{
                str(status): {
                    "description": HTTPStatus(status).phrase,
                    "content": {_JSON: {"schema": references[ErrorAnswer]}},
                }
                for status in sorted(errors)
            },
        },
    }
    if operation.aliases:
        described["description"] = f"Also at {' and '.join(operation.aliases)}."
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": references[operation.body]}},
        }
    if operation.needs_key:
        described["security"] = [{"key": []}, {}]
    if "{" in operation.path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described
