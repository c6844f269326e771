import gguf
import numpy as np
import pytest
import torch

from pelton.checkpoint.embedded import embedded_model
from pelton.checkpoint.gguf_header import READABLE_TYPES, read_gguf_header
from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.source import resolve_checkpoint
from pelton.errors import UnsupportedError
from pelton.weights.gguf import GGUFSource

TYPES = gguf.GGMLQuantizationType


def _write(path, tensors):
    return _write_raw(
        path, {name: (gguf.quantize(data, kind), kind) for name, (data, kind) in tensors.items()}
    )


def _write_raw(path, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(read_gguf_header(path))


@pytest.mark.parametrize("name", READABLE_TYPES)
def test_every_readable_type_equals_the_library_bit_for_bit(tmp_path, name):
    kind = TYPES[name]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_columns = 3 * max(block, 32)
    rng = np.random.default_rng(3)
    if block == 1:
        raw = gguf.quantize(rng.normal(size=(7, num_columns)).astype(np.float32), kind)
    else:
        # Most types can not be quantised by the library; any bytes are a legal tensor.
        raw = rng.integers(0, 256, (7, num_columns // block * num_bytes), dtype=np.uint8)
    pad = np.arange(3, dtype=np.float32)
    source = _write_raw(tmp_path / "m.gguf", {"pad": (pad, TYPES.F32), "w": (raw, kind)})
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, kind).copy())
    assert source.names() == ["pad", "w"]
    assert source.shape("w") == (7, num_columns)

    def check(values, wanted):
        assert torch.equal(values.float().nan_to_num(), wanted.nan_to_num())

    check(source.read("w", 0, 0, 7), expected)
    check(source.read("w", 0, 2, 3), expected[2:5])
    # Cuts along a row: at a block's edge, and inside blocks.
    last = num_columns - 1
    for start, size in ((block, 32), (5, last - 20), (0, num_columns), (last, 1)):
        check(source.read("w", 1, start, size), expected[:, start : start + size])


@pytest.mark.parametrize("name", ["F32", "Q8_0", "MXFP4"])
def test_stacks(tmp_path, name):
    """Experts' matrices, one behind the other: each is read by itself."""
    data = np.random.default_rng(6).normal(size=(5, 3, 64)).astype(np.float32)
    raw = gguf.quantize(data, TYPES[name])
    source = _write_raw(tmp_path / "m.gguf", {"w": (raw, TYPES[name])})
    expected = torch.from_numpy(gguf.dequantize(raw, TYPES[name]).copy())
    assert source.shape("w") == (5, 3, 64)
    for expert in range(5):
        assert torch.equal(source.read("w", 0, expert, 1)[0], expected[expert])
    assert torch.equal(source.read("w", 1, 1, 2), expected[:, 1:])


def test_vectors(tmp_path):
    data = np.random.default_rng(4).normal(size=64).astype(np.float32)
    source = _write(tmp_path / "m.gguf", {"w": (data, TYPES.Q8_0)})
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(data, TYPES.Q8_0), TYPES.Q8_0))
    assert torch.equal(source.read("w", 0, 3, 40), expected[3:43])


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I32", "F64"])
def test_other_types_are_refused_by_name(tmp_path, name):
    block, num_bytes = gguf.GGML_QUANT_SIZES[TYPES[name]]
    raw = np.zeros((2, 8 * num_bytes if block == 1 else num_bytes), np.uint8)
    source = _write_raw(tmp_path / "m.gguf", {"some.weight": (raw, TYPES[name])})
    with pytest.raises(UnsupportedError, match=f"'some.weight' has type {name}"):
        source.read("some.weight", 0, 0, 2)


def test_a_split_model_is_read_from_all_its_parts(tmp_path):
    data = np.random.default_rng(5).normal(size=(3, 4, 32)).astype(np.float32)
    names = ["b", "c", "a"]
    for place, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / f"m-{place + 1:05}-of-00003.gguf", "llama")
        writer.add_uint16("split.no", place)
        writer.add_uint16("split.count", 3)
        writer.add_tensor(name, data[place])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    checkpoint = resolve_checkpoint(str(tmp_path / "m-00001-of-00003.gguf"))
    source = GGUFSource.open(checkpoint, {}, NameRules(()), 0)
    assert source.names() == names
    for place, name in enumerate(names):
        assert torch.equal(source.read(name, 0, 0, 4), torch.from_numpy(data[place]))


@pytest.mark.parametrize(
    "name", ["blk.7.ffn_down.weight", "token_embd.weight", "output_norm.weight"]
)
def test_the_embedded_model_equals_the_library(name):
    header = read_gguf_header(embedded_model())
    tensor = header.tensors[name]
    rows = min(tensor.shape[0], 600)
    data = np.memmap(header.path, np.uint8, "r")[tensor.start : tensor.end]
    kind = TYPES[tensor.type.name]
    raw = data.reshape(tensor.shape[0], -1)[:rows]
    expected = torch.from_numpy(gguf.dequantize(raw.copy(), kind)).reshape(rows, *tensor.shape[1:])
    assert torch.equal(GGUFSource(header).read(name, 0, 0, rows), expected)


def test_blocks_are_the_file_s_bytes_and_pages_behind_are_given_back(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (40, 64 * 34), dtype=np.uint8)
    numbers = np.ones((3, 5), np.float32)
    tensors = {f"w{i}": (rows + i, TYPES.Q8_0) for i in range(3)}
    source = _write_raw(tmp_path / "m.gguf", {"a": (numbers, TYPES.F32), **tensors})
    assert source.blocks("a") is None
    for _ in range(2):  # in the file's order, and from the start again
        for i in range(3):
            found = source.blocks(f"w{i}")
            assert found.form == "Q8_0"
            assert torch.equal(found.rows, torch.from_numpy(rows + i))
    first = source.blocks("w0").rows
    source.blocks("w2")
    assert torch.equal(first, torch.from_numpy(rows)), "given back, and read again"
