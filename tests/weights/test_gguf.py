import gguf
import numpy as np
import pytest
import torch

from pelton.checkpoint.embedded import embedded_model
from pelton.checkpoint.gguf_header import READABLE_TYPES, read_gguf_header
from pelton.errors import UnsupportedError
from pelton.weights.gguf import GGUFSource

TYPES = gguf.GGMLQuantizationType


def _write(path, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(read_gguf_header(path))


@pytest.mark.parametrize("name", READABLE_TYPES)
def test_every_readable_type_equals_the_library_bit_for_bit(tmp_path, name):
    kind = TYPES[name]
    data = np.random.default_rng(3).normal(size=(7, 96)).astype(np.float32)
    source = _write(tmp_path / "m.gguf", {"pad": (data[0, :3], TYPES.F32), "w": (data, kind)})
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(data, kind), kind))
    assert source.names() == ["pad", "w"]
    assert source.shape("w") == (7, 96)
    assert torch.equal(source.read("w", 0, 0, 7).float(), expected)
    assert torch.equal(source.read("w", 0, 2, 3).float(), expected[2:5])
    # Cuts along a row: at a block's edge, and inside blocks.
    for start, size in ((32, 32), (5, 70), (0, 96), (95, 1)):
        assert torch.equal(
            source.read("w", 1, start, size).float(), expected[:, start : start + size]
        )


def test_vectors(tmp_path):
    data = np.random.default_rng(4).normal(size=64).astype(np.float32)
    source = _write(tmp_path / "m.gguf", {"w": (data, TYPES.Q8_0)})
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(data, TYPES.Q8_0), TYPES.Q8_0))
    assert torch.equal(source.read("w", 0, 3, 40), expected[3:43])


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q6_K"])
def test_other_types_are_refused_by_name(tmp_path, name):
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[TYPES[name]][1]), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("some.weight", raw, raw_dtype=TYPES[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(read_gguf_header(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedError, match=f"'some.weight' has type {name}"):
        source.read("some.weight", 0, 0, 2)


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
