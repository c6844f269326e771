import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from pelton.errors import CheckpointError, UnsupportedError
from pelton.weights.safetensors import SafetensorsSource


def test_slices_of_every_dtype_over_several_files(tmp_path):
    full = {
        str(dtype): torch.randn(6, 10).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    files = []
    for index, (name, tensor) in enumerate(full.items()):
        files.append(tmp_path / f"{index}.safetensors")
        save_file({name: tensor}, files[-1])
    source = SafetensorsSource(files)
    assert set(source.names()) == set(full)
    for name, tensor in full.items():
        assert torch.equal(source.read(name, 0, 1, 4), tensor[1:5])
        assert torch.equal(source.read(name, 1, 3, 5), tensor[:, 3:8])


def test_data_that_is_not_aligned(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<3f", 1, 2, 3))
    assert SafetensorsSource([path]).read("w", 0, 0, 3).tolist() == [1, 2, 3]


def test_reading_leaves_the_file_alone(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(4)}, path)
    before = path.read_bytes()
    SafetensorsSource([path]).read("w", 0, 0, 4).zero_()
    assert path.read_bytes() == before


def test_a_name_in_two_files(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in files:
        save_file({"w": torch.ones(4)}, path)
    with pytest.raises(CheckpointError, match="'w' is in both"):
        SafetensorsSource(files)


def test_integers_are_no_weights(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(4, dtype=torch.int32)}, path)
    with pytest.raises(UnsupportedError, match="'w' has dtype I32"):
        SafetensorsSource([path]).read("w", 0, 0, 4)
