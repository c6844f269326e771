"""What can be wrong with `ServerArgs`, found before anything is started."""

from __future__ import annotations

import math
import re
from datetime import date
from types import NoneType
from typing import Any, get_args, get_type_hints

from pelton.config.names import known_names
from pelton.config.server import ServerArgs
from pelton.errors import ConfigError
from pelton.server.listen import check_certificates

_LOG_LEVELS = ("debug", "info", "warning", "error")
_CONTENT_FORMATS = ("auto", "string", "parts")
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_ORIGIN = re.compile(
    r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://"
    r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
"""RFC 6454, 6.2, as browsers write it."""
_KIND_WORDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
}
_INT32 = 2**31 - 1
_INTEGERS = {
    "port": (0, 65535),
    "max_body_bytes": (1, 2**40),
    "max_num_queued_reqs": (0, _INT32),
    "keep_alive_timeout": (0, _INT32),
}
_SECONDS = ("shutdown_timeout", "log_interval")
_TIME_LIMITS = ("head_timeout", "body_timeout", "send_timeout")


def check_server(args: ServerArgs) -> None:
    """Raises ConfigError naming field, value and limit."""
    for name, hint in get_type_hints(ServerArgs).items():
        _check_type(name, getattr(args, name), hint)
    for name, (low, high) in _INTEGERS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} must be from {low} to {high}, got {value}.")
    for name in _SECONDS:
        value = getattr(args, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be a number of seconds, 0 or more, got {value}.")
    for name in _TIME_LIMITS:
        value = getattr(args, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be a number of seconds, more than 0, got {value}.")
    _check_name("log_level", args.log_level, _LOG_LEVELS)
    _check_name("chat_template_content_format", args.chat_template_content_format, _CONTENT_FORMATS)
    if not _PREFIX.fullmatch(args.metrics_prefix):
        raise ConfigError(
            f"metrics_prefix={args.metrics_prefix!r} must be of letters, digits and underscores."
        )
    if args.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", args.root_path):
        raise ConfigError(
            f"root_path={args.root_path!r} must begin with a slash and not end with one."
        )
    for name in args.served_model_name or ():
        if not name:
            raise ConfigError("served_model_name must not be empty.")
    for origin in args.allowed_origins or ():
        _check_origin(origin)
    check_certificates(args)


def _check_type(name: str, value: object, hint: Any) -> None:
    allowed = get_args(hint) or (hint,)
    if value is None and type(None) in allowed:
        return
    if list[str] in allowed or hint == list[str]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return
        raise ConfigError(
            f"{name} must be a list of texts, got {_shown(name, value)}{_quoted(value)}."
        )
    kinds = tuple(kind for kind in allowed if kind is not type(None))
    # An int is a number too; a bool is no int here.
    if float in kinds and type(value) is int:
        return
    if type(value) not in kinds:
        advice = _quoted(value) if str in kinds else ""
        raise ConfigError(
            f"{name} must be {_KIND_WORDS[kinds[0]]}, got {_shown(name, value)}{advice}."
        )


def _quoted(value: object) -> str:
    """What to do about text that a configuration file's YAML takes for something else."""
    values = value if isinstance(value, list) else [value]
    kinds = (bool, int, float, date, NoneType)
    return "; put it in quotes" if any(isinstance(one, kinds) for one in values) else ""


def _check_origin(origin: str) -> None:
    """Raises ConfigError for one that no browser sends, so that it would never match."""
    if origin in ("*", "null") or _ORIGIN.fullmatch(origin):
        return
    scheme, separator, rest = origin.partition("://")
    if not separator:
        what = "it has no scheme"
    elif "*" in rest:
        what = "* stands for all origins, alone, and not for a part of one"
    elif re.search(r"[/?#]", rest):
        what = "it goes on after host and port; there is not even a slash"
    elif origin != origin.lower():
        what = "browsers send small letters"
    elif _DEFAULT_PORTS.get(scheme, "?") == rest.rpartition(":")[2]:
        what = "browsers leave out the port that is the scheme's own"
    else:
        what = "it is no scheme://host or scheme://host:port"
    raise ConfigError(
        f"allowed_origins={origin!r} would never match: {what}. Write it as https://example.org or "
        "http://localhost:3000."
    )


def _check_name(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{field}={value!r} is not known." + known_names(value, known))


def _shown(name: str, value: object) -> str:
    is_secret = name in ("api_key", "ssl_keyfile_password")
    return _KIND_WORDS.get(type(value), f"a {type(value).__name__}") if is_secret else repr(value)
