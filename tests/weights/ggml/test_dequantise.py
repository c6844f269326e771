import gguf
import numpy as np
import pytest
import torch

from pelton.checkpoint.gguf_header import READABLE_TYPES
from pelton.weights.ggml import dequantise as module
from pelton.weights.ggml.dequantise import QUANTISED_TYPES, dequantise
from pelton.weights.ggml.grids import codebook

TYPES = gguf.GGMLQuantizationType


def _theirs(name, raw):
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, TYPES[name]).reshape(raw.shape[0], -1)


def _assert_same_bits(ours, theirs):
    """NaN equals NaN, and -0.0 is not 0.0."""
    ours = ours.numpy()
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def _ours(name, raw):
    out = torch.full((raw.shape[0], gguf.GGML_QUANT_SIZES[TYPES[name]][0]), torch.nan)
    dequantise(name, torch.from_numpy(raw), out)
    return out


def test_all_that_the_library_dequantises_and_nothing_else():
    theirs = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert set(READABLE_TYPES) == theirs
    assert set(QUANTISED_TYPES) == theirs - {"F32", "F16", "BF16"}


@pytest.mark.parametrize("name", QUANTISED_TYPES)
def test_random_bytes_equal_the_library_bit_for_bit(name):
    num_bytes = gguf.GGML_QUANT_SIZES[TYPES[name]][1]
    raw = np.random.default_rng(1).integers(0, 256, (997, num_bytes), dtype=np.uint8)
    theirs = _theirs(name, raw)
    assert np.isfinite(theirs).mean() > 0.9
    _assert_same_bits(_ours(name, raw), theirs)


@pytest.mark.parametrize("name", QUANTISED_TYPES)
def test_each_byte_takes_each_value(name):
    """One block per byte and value, over a block of random bytes: scales of all sizes, too."""
    num_bytes = gguf.GGML_QUANT_SIZES[TYPES[name]][1]
    base = np.random.default_rng(2).integers(0, 256, num_bytes, dtype=np.uint8)
    raw = np.tile(base, (num_bytes, 64, 1))
    values = np.arange(0, 256, 4) + np.arange(num_bytes)[:, None] % 4
    np.put_along_axis(
        raw,
        np.broadcast_to(np.arange(num_bytes)[:, None, None], (num_bytes, 64, 1)),
        values[..., None].astype(np.uint8),
        axis=2,
    )
    raw = raw.reshape(-1, num_bytes)
    _assert_same_bits(_ours(name, raw), _theirs(name, raw))


@pytest.mark.parametrize("name", QUANTISED_TYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_few_blocks_and_runs_that_end_in_the_middle(name, count, monkeypatch):
    monkeypatch.setattr(module, "_RUN", 2 * gguf.GGML_QUANT_SIZES[TYPES[name]][0])
    num_bytes = gguf.GGML_QUANT_SIZES[TYPES[name]][1]
    raw = np.random.default_rng(count).integers(0, 256, (count, num_bytes), dtype=np.uint8)
    theirs = _theirs(name, raw) if count else np.empty((0, _ours(name, raw).shape[1]), np.float32)
    _assert_same_bits(_ours(name, raw), theirs)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_every_point_of_every_codebook(name):
    theirs = gguf.quants._type_traits[TYPES[name]]
    theirs.init_grid()
    assert np.array_equal(codebook(name).numpy(), theirs.grid.reshape(theirs.grid_shape))
