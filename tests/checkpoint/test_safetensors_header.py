import json
import struct

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from pelton.checkpoint.safetensors_header import read_safetensors_header
from pelton.errors import CheckpointError


def _write(path, header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def _one(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_reads_what_the_library_wrote(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_safetensors_header(path)
    assert set(header) == set(tensors)
    data = path.read_bytes()
    for name, tensor in tensors.items():
        entry = header[name]
        assert entry.shape == tuple(tensor.shape)
        stored = data[entry.start : entry.end]
        assert stored == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert [header[n].dtype for n in "abc"] == ["BF16", "I64", "F64"]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (_one(), b"1234", "truncated"),
        (_one(dtype="F33"), b"12345678", "unknown dtype 'F33'"),
        (_one(shape=[3]), b"12345678", "needs 12 bytes"),
        (_one(shape=[-2]), b"12345678", "impossible shape"),
        (_one(shape=[True, 2]), b"12345678", "impossible shape"),
        (_one(data_offsets=[8, 0]), b"12345678", "impossible data_offsets"),
        (_one(data_offsets=[0]), b"12345678", "impossible data_offsets"),
        (
            {**_one(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
            b"123456789012",
            "'w' and 'v' overlap",
        ),
        (_one(), b"12345678x", "last 1 bytes are of no tensor"),
        (_one(data_offsets=[4, 12]), b"123456789012", "4 bytes before tensor 'w'"),
        (
            {**_one(), "v": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}},
            b"1234567890123456",
            "4 bytes before tensor 'v'",
        ),
        ({**_one(), "__metadata__": 5}, b"12345678", "__metadata__"),
        ({**_one(), "__metadata__": {"a": 5}}, b"12345678", "__metadata__"),
        ({"w": 3}, b"", "'w' is described by 3"),
        ([1], b"", "not a JSON object"),
        (b'{"w": 1, "w": 2}', b"", "'w' occurs twice"),
        (b"{nonsense", b"", "not JSON"),
        (b"\xff\xfe", b"", "not JSON"),
    ],
)
def test_faults_name_file_and_tensor(tmp_path, header, data, says):
    path = _write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says) as error:
        read_safetensors_header(path)
    assert str(path) in str(error.value)
    with pytest.raises(SafetensorError):  # the library takes none of them either
        safetensors.deserialize(path.read_bytes())


@pytest.mark.parametrize(("size", "says"), [(2**63, "not a safetensors"), (1000, "truncated")])
def test_header_length_is_checked(tmp_path, size, says):
    with pytest.raises(CheckpointError, match=says):
        read_safetensors_header(_write(tmp_path / "x", _one(), b"12345678", size=size))


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_safetensors_header(tmp_path / "absent.safetensors")


def test_truncated_anywhere(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_safetensors_header(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_garbage_never_gives_another_error(tmp_path, data):
    path = tmp_path / "g"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        for tensor in read_safetensors_header(path).values():
            assert 0 <= tensor.start <= tensor.end <= len(content)
    except CheckpointError:
        pass
