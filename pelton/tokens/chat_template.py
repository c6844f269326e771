"""Chat messages to prompt text, by the model's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from pelton.errors import ConfigError, RequestError
from pelton.tokens.template_sandbox import TemplateEnvironment

ContentFormat = Literal["string", "parts"]
ContentChoice = Literal["auto", "string", "parts"]

_MAX_DEPTH = 100
# No template strips it, repeats it or treats it specially, and no text holds it.
_END_MARK = "\ue000pelton-end-of-message\ue001"


class ChatTemplate:
    """The chat templates of one model.

    Templates run in a sandbox with limits on time and memory (`template_sandbox`). What they see
    are plain strings, numbers, lists and dicts, copied from the request.

    Text that users send is not escaped: where it spells a special token, `encode_chat` makes that
    token of it, as transformers does.

    Args:
        templates: Jinja source; or name -> source, of which "tool_use" serves requests with tools
            and "default" all others; or None for a model without one (then `render` refuses).
        special_tokens: "bos_token", "eos_token", ... -> text, variables of the template.
        content_format: what the template expects as message content. "auto" looks: a template
            that loops over the content wants parts. For "string", text parts are joined by a
            line break; for "parts", a plain string becomes one text part unless the template
            tells strings and parts apart itself.

    Raises ConfigError if a template can not be compiled, naming line and reason.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentChoice = "auto",
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._special_tokens = dict(special_tokens or {})
        self._environment = _environment()
        self._compiled = {
            name: _Compiled(self._environment, source, content_format)
            for name, source in named.items()
        }

    def content_format(self, *, has_tools: bool = False) -> ContentFormat:
        """What the template in use expects as message content.

        Raises RequestError if there is no template.
        """
        return self._choose(has_tools).content_format

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text. Encode it with `Tokenizer.encode_chat`.

        Args:
            messages: dicts with role (str) and content (str, list of text parts; null or absent
                only beside tool_calls). Null content comes as None to a template that asks whether
                it is none, and to others as no text. Arguments of tool_calls that are JSON text, as
                OpenAI has them, come as objects to a template that writes them as JSON. A refusal
                is text of the assistant's like any other. Other keys are passed on; null ones are
                dropped; function_call, the older form of tool_calls, is refused unless the template
                knows it.
            tools: JSON schemas of functions, or None.
            add_generation_prompt: end with the start of the assistant's answer.
            continue_final_message: end in the middle of the last message, which the model then
                goes on with.
            variables: further variables of the template (chat_template_kwargs).

        Raises RequestError naming field and value, or with the template's own message.
        """
        compiled = self._choose(tools is not None)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt can not both be true; set "
                "add_generation_prompt to false.",
                field="continue_final_message",
            )
        shown = _messages(messages, compiled)
        final = _mark_end(shown) if continue_final_message else ""
        text = self._run(
            compiled,
            {
                **self._special_tokens,
                **{name: _plain(value, name) for name, value in variables.items()},
                "messages": shown,
                "tools": _tools(tools),
                "add_generation_prompt": bool(add_generation_prompt),
            },
        )
        return _cut_at_end(text, final) if continue_final_message else text

    def _choose(self, has_tools: bool) -> _Compiled:
        if has_tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        if "default" not in self._compiled:
            named = ", ".join(sorted(self._compiled)) or "none"
            raise RequestError(
                f"the model has no default chat template (it has: {named}); give one as "
                "chat_template (--chat-template FILE), or send the text as a prompt.",
                field="messages",
            )
        return self._compiled["default"]

    def _run(self, compiled: _Compiled, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render(compiled.template, variables)
        except RecursionError:
            reason = "it calls itself without end"
        except Exception as error:  # foreign code: anything can come out of it
            reason = str(error) or type(error).__name__
        raise RequestError(f"the chat template failed: {reason}", field="messages")


class _Compiled:
    """One template and what it expects."""

    def __init__(
        self,
        environment: TemplateEnvironment,
        source: str,
        content_format: ContentChoice,
    ) -> None:
        try:
            tree = environment.parse(source)
            self.template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template can not be used: line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            # What Python's own compiler says to code that is nested too deeply.
            raise ConfigError(f"the chat template can not be used: {error}") from None
        loops, self.tells_apart = _uses_of_content(tree)
        self.knows_none = _asks_for_none(tree)
        self.wants_objects = _wants_objects(tree)
        self.knows_function_call = "function_call" in source
        found: ContentFormat = "parts" if loops else "string"
        self.content_format = found if content_format == "auto" else content_format


@lru_cache(maxsize=1)
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


def _uses_of_content(tree: nodes.Template) -> tuple[bool, bool]:
    """Whether the template loops over message content, and whether it asks if it is a string."""
    names = _names_of("content", tree)
    loops = any(_is_value(loop.iter, "content", names) for loop in tree.find_all(nodes.For))
    kinds = ("string", "iterable", "sequence", "mapping")
    return loops, _tests(tree, "content", names, kinds)


def _asks_for_none(tree: nodes.Template) -> bool:
    """Whether the template knows messages whose content is none."""
    names = _names_of("content", tree)
    return _tests(tree, "content", names, ("none",)) or any(
        _is_value(compare.expr, "content", names)
        and any(isinstance(op.expr, nodes.Const) and op.expr.value is None for op in compare.ops)
        for compare in tree.find_all(nodes.Compare)
    )


def _wants_objects(tree: nodes.Template) -> bool:
    """Whether arguments of tool calls must be objects: the template writes them, or calls as a
    whole, as JSON, or goes through them. One that asks whether they are a string takes either; one
    that does nothing of this takes text."""
    names = _names_of("arguments", tree)

    def is_it(node: nodes.Node | None) -> bool:
        return node is not None and _is_value(node, "arguments", names)

    if _tests(tree, "arguments", names, ("string",)):
        return False
    filters = list(tree.find_all(nodes.Filter))
    return (
        any(
            one.name in ("tojson", "items", "dictsort", "length") and is_it(one.node)
            for one in filters
        )
        or any(
            one.attr in ("items", "keys") and is_it(one.node)
            for one in tree.find_all(nodes.Getattr)
        )
        or any(is_it(loop.iter) for loop in tree.find_all(nodes.For))
        or (
            any(one.name == "tojson" for one in filters)
            and not any(is_it(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem)))
        )
    )


def _tests(tree: nodes.Template, key: str, names: set[str], kinds: Sequence[str]) -> bool:
    return any(
        test.name in kinds and _is_value(test.node, key, names)
        for test in tree.find_all(nodes.Test)
    )


def _names_of(key: str, tree: nodes.Template) -> set[str]:
    """Names that the template gives to what `_is_value`."""
    names = {key}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_value(assign.node, key, names):
            names.add(assign.target.name)
    return names


def _is_value(node: nodes.Node, key: str, names: set[str]) -> bool:
    """message[key], message.key, or one of `names` for it, maybe filtered or sliced."""
    while isinstance(node, nodes.Filter) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:  # the filter of a {% filter %} block
            return False
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == key
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == key
    )


def _messages(messages: Any, compiled: _Compiled) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(
            f"messages must be a non-empty list of objects, got {_shown(messages)}.",
            field="messages",
        )
    return [_message(message, f"messages[{at}]", compiled) for at, message in enumerate(messages)]


def _message(message: Any, where: str, compiled: _Compiled) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, "an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", "a non-empty string", role)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _wrong(f"{where}.tool_calls", "a list", calls)
    if message.get("function_call") is not None:
        if not compiled.knows_function_call:
            raise RequestError(
                f"{where}.function_call is the older form of tool_calls, and this model's chat "
                "template does not know it; send the call as tool_calls.",
                field=f"{where}.function_call",
            )
        calls = calls or [message["function_call"]]
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and not calls:
        raise RequestError(
            f"{where}.content is {'null' if 'content' in message else 'missing'}; it must be a "
            "string or a list of text parts unless the message has tool_calls.",
            field=f"{where}.content",
        )
    shown: dict[str, Any] = _plain(
        {key: value for key, value in message.items() if value is not None and key != "content"},
        where,
    )
    if content is not None or not compiled.knows_none:
        shown["content"] = _content(
            "" if content is None else content, f"{where}.content", compiled
        )
    else:
        shown["content"] = None
    if compiled.wants_objects:
        for at, call in enumerate(shown.get("tool_calls", ())):
            _parse_arguments(call, f"{where}.tool_calls[{at}]")
    return shown


def _parse_arguments(call: Any, where: str) -> None:
    """JSON text -> object, in place."""
    function, place = call, where
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        function, place = call["function"], f"{where}.function"
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str):
        return
    try:
        arguments = json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{place}.arguments", "a JSON object as text", given)
    function["arguments"] = _plain(arguments, f"{place}.arguments")


def _content(content: Any, where: str, compiled: _Compiled) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        text = _text(content, where)
        if compiled.content_format == "parts" and not compiled.tells_apart:
            return [{"type": "text", "text": text}]
        return text
    if not isinstance(content, (list, tuple)):
        raise _wrong(where, "a string or a list of text parts", content)
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
    if compiled.content_format == "parts":
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise _wrong(where, "an object like {'type': 'text', 'text': '...'}", part)
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": _text(part["refusal"], f"{where}.refusal")}
    if part.get("type") != "text":
        raise RequestError(
            f"{where}.type must be 'text', got {_shown(part.get('type'))}: this model takes only "
            "text.",
            field=f"{where}.type",
        )
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", "a string", part.get("text"))
    shown = _plain(part, where)
    assert isinstance(shown, dict)
    return shown


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise _wrong("tools", "a list of objects", tools)
    for at, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _wrong(f"tools[{at}]", "an object", tool)
    return [_plain(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types, so that a template finds no method that does something."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested deeper than {_MAX_DEPTH} levels.", field=where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _wrong(f"a key of {where}", "a string", key)
        return {
            str.__str__(key): _plain(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    raise _wrong(where, "a JSON value", value)


def _text(value: str, where: str) -> str:
    if _END_MARK in value:
        raise RequestError(f"{where} holds {_END_MARK!r}, which is reserved.", field=where)
    return str.__str__(value)


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put the end mark behind the last message's text, in place; returns the text."""
    message = messages[-1]
    holder, key = message, "content"
    if isinstance(content := message.get("content"), list) and content:
        holder, key = content[-1], "text"
    text = holder.get(key)
    if not isinstance(text, str) or not text:
        raise RequestError(
            "continue_final_message needs a last message with text, got "
            f"{_shown(message.get('content'))} as its content.",
            field="continue_final_message",
        )
    # The space shows whether the template trims: then the text's own end is trimmed as well.
    holder[key] = text + _END_MARK + " "
    return text


def _cut_at_end(rendered: str, final: str) -> str:
    before, mark, after = rendered.rpartition(_END_MARK)
    if not mark or _END_MARK in before or final.strip() not in before:
        raise RequestError(
            "continue_final_message: the chat template changes the text of the last message, so "
            "it can not be continued.",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _wrong(where: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {expected}, got {_shown(value)}.", field=where)


def _shown(value: Any) -> str:
    """The value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
