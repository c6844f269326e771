"""Embeddings as users bring them, made into what an engine takes. No torch."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.checkpoint.safetensors_header import parse_safetensors_header
from pelton.core.plan import Int32Array
from pelton.core.prompt_embeds import STORED_AS, PromptEmbeds
from pelton.core.request import as_token_ids
from pelton.errors import CheckpointError, RequestError

_Array = npt.NDArray[Any]
_FIELD = "prompt_embeds"
_SAFETENSORS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
# One tensor, and perhaps some metadata: a client's JSON is not to take long.
_MAX_HEADER_BYTES = 2**16
_CACHED_ELEMENTS = 2**16
_DENSE = "torch.strided"
# The type of the bits, and those that are all set in what is not finite.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
}


def read_prompt_embeds(data: bytes) -> PromptEmbeds:
    """What a safetensors file of one tensor holds, whatever the tensor's name: [T, H] float16,
    bfloat16, float32 or float64.

    Nothing of it is code, and nothing is copied. Raises RequestError for everything else.
    """
    try:
        tensors = parse_safetensors_header(io.BytesIO(data), _MAX_HEADER_BYTES)
    except CheckpointError as error:
        raise RequestError(
            f"prompt_embeds must be a safetensors file: {error}.", field=_FIELD
        ) from None
    if len(tensors) != 1:
        raise RequestError(
            f"prompt_embeds must be a safetensors file of 1 tensor, got {len(tensors)}.",
            field=_FIELD,
        )
    ((name, tensor),) = tensors.items()
    dtype = _SAFETENSORS.get(tensor.dtype)
    if dtype is None:
        raise RequestError(
            f"prompt_embeds must be {', '.join(_SAFETENSORS)}, got {tensor.dtype} ({name!r}).",
            field=_FIELD,
        )
    _check_shape(tensor.shape)
    stored = np.dtype(STORED_AS[dtype]).newbyteorder("<")
    rows = np.frombuffer(data, np.uint8)[tensor.start : tensor.end].view(stored)
    return PromptEmbeds(rows.reshape(tensor.shape), dtype)


def as_prompt_embeds(
    given: Any, is_row: _Array | None, *, dtype: str, hidden_size: int, max_rows: int
) -> PromptEmbeds:
    """The rows that an engine of `dtype` and `hidden_size` is to compute on.

    Args:
        given: a tensor of torch, an array of numpy, or PromptEmbeds: [T, hidden_size], T at most
            max_rows, of a floating dtype.
        is_row: [T] bool, at least one true: the places of the prompt whose rows count; None: all.
            `given` may then also have rows for these alone.

    Raises RequestError naming what is wrong, and for numbers that are not finite in `dtype`: they
    would make every later token of the request NaN.
    """
    found = _as_stored(given, hidden_size, max_rows)
    rows = found.rows
    if is_row is not None:
        num_wanted = int(is_row.sum())
        if len(rows) == len(is_row):
            rows = rows[is_row]
        elif len(rows) != num_wanted:
            raise RequestError(
                f"prompt_embeds must have {len(is_row)} rows, one for each place of the prompt, or "
                f"{num_wanted}, one for each False of prompt_is_token_ids; got {len(rows)}.",
                field=_FIELD,
            )
    kept = _as_dtype(rows, found.dtype, dtype)
    bits, exponent = _EXPONENTS[dtype]
    step = _rows_at_once(kept)
    for first in range(0, len(kept), step):
        part = kept[first : first + step].view(bits)
        is_finite = ((part & exponent) != exponent).all(axis=1)
        if not is_finite.all():
            raise RequestError(
                f"prompt_embeds must be finite in {dtype}; row {first + int(is_finite.argmin())} "
                "is not.",
                field=_FIELD,
            )
    return PromptEmbeds(kept, dtype)


def as_mix(ids: Any, is_token: Any) -> tuple[Int32Array, _Array]:
    """(token ids [T], which places have embeddings [T]) of a prompt that has both, as users give
    them.

    Raises RequestError; ids beyond the vocabulary are for others to find.
    """
    if ids is None or is_token is None:
        raise RequestError(
            "a prompt of token ids and embeddings needs prompt_token_ids, prompt_embeds and "
            "prompt_is_token_ids, a list that is true where a token id stands and false where an "
            "embedding does.",
            field="prompt_is_token_ids",
        )
    array = as_token_ids(ids)
    try:
        is_token_np = np.asarray(is_token)
    except (ValueError, TypeError, RuntimeError) as fault:
        raise RequestError(
            f"prompt_is_token_ids must be a list of {len(array)} booleans: "
            f"{str(fault).rstrip('.')}.",
            field="prompt_is_token_ids",
        ) from None
    if is_token_np.shape != array.shape or is_token_np.dtype != np.bool_:
        raise RequestError(
            f"prompt_is_token_ids must be a list of {len(array)} booleans, one for each of "
            f"prompt_token_ids, got {is_token_np.dtype} of shape {is_token_np.shape}.",
            field="prompt_is_token_ids",
        )
    negative = array[is_token_np & (array < 0)]
    if len(negative):
        raise RequestError(
            f"prompt_token_ids must not be negative where prompt_is_token_ids is true, got "
            f"{int(negative[0])}.",
            field="prompt_token_ids",
        )
    return array, ~is_token_np


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) != 2:
        raise RequestError(
            f"prompt_embeds must have 2 dimensions, [T, H], got {list(shape)}.", field=_FIELD
        )


def _as_stored(given: Any, hidden_size: int, max_rows: int) -> PromptEmbeds:
    """What is given, in its own dtype. Nothing that is too large is copied."""
    if isinstance(given, PromptEmbeds):
        shape, name = given.rows.shape, given.dtype
    elif isinstance(given, np.ndarray) or _is_tensor(given):
        layout = (
            "nested" if getattr(given, "is_nested", False) else getattr(given, "layout", _DENSE)
        )
        if str(layout) != _DENSE:
            raise RequestError(
                f"prompt_embeds must be a dense tensor, got one of layout {layout}.", field=_FIELD
            )
        if getattr(given, "is_meta", False):
            raise RequestError(
                "prompt_embeds must have numbers, got a tensor of device 'meta', which has none.",
                field=_FIELD,
            )
        shape, name = tuple(given.shape), str(given.dtype).removeprefix("torch.")
    else:
        raise RequestError(
            f"prompt_embeds must be a tensor or an array, got {type(given).__name__}.", field=_FIELD
        )
    if name not in STORED_AS:
        raise RequestError(
            f"prompt_embeds must be {', '.join(STORED_AS)}, got {name}.", field=_FIELD
        )
    _check_shape(shape)
    if shape[1] != hidden_size:
        raise RequestError(
            f"prompt_embeds must have {hidden_size} columns, the model's hidden size, got "
            f"{shape[1]}.",
            field=_FIELD,
        )
    if not 1 <= shape[0] <= max_rows:
        raise RequestError(
            f"prompt_embeds may have 1 to {max_rows} rows (max_model_len allows no longer prompt), "
            f"got {shape[0]}.",
            field=_FIELD,
        )
    if isinstance(given, PromptEmbeds):
        return given
    if isinstance(given, np.ndarray):
        return PromptEmbeds(given.astype(STORED_AS[name], copy=False), name)
    given = given.detach().cpu().resolve_neg().contiguous()
    if name == "bfloat16":
        # Whoever has a tensor has imported torch.
        given = given.view(sys.modules["torch"].int16)
    return PromptEmbeds(given.numpy().view(STORED_AS[name]), name)


def _is_tensor(given: Any) -> bool:
    """Of torch, which is not imported here."""
    return type(given).__module__.partition(".")[0] == "torch" and hasattr(given, "detach")


def _rows_at_once(rows: _Array) -> int:
    """So many that what is made of them on the way stays in the cache."""
    return max(1, _CACHED_ELEMENTS // int(rows.shape[1]))


def _as_dtype(rows: _Array, name: str, dtype: str) -> _Array:
    """Rounded to nearest, ties to even. What is too large becomes infinite."""
    if name == dtype:
        return rows
    out = np.empty(rows.shape, STORED_AS[dtype])
    step = _rows_at_once(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            if name == "bfloat16":
                part = (part.astype(np.uint32) << 16).view(np.float32)
            out[first : first + step] = _bfloat16(part) if dtype == "bfloat16" else part
    return out


def _bfloat16(rows: _Array) -> _Array:
    """Its bits, of any floats."""
    bits = rows.astype(np.float32).view(np.uint32)
    half = (bits >> 16 & 1) + np.uint32(0x7FFF)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could carry into the sign
    return np.where(is_nan, 0x7FC0, bits + half >> 16).astype(np.uint16)
