import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.checkpoint import gguf_header
from pelton.checkpoint.embedded import embedded_model
from pelton.checkpoint.gguf_header import GGML_TYPES, gguf_parts, read_gguf_header
from pelton.errors import CheckpointError


def _small_file(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("k.u8", 200)
    writer.add_int8("k.i8", -3)
    writer.add_uint16("k.u16", 60000)
    writer.add_int16("k.i16", -30000)
    writer.add_uint32("k.u32", 4_000_000_000)
    writer.add_int32("k.i32", -5)
    writer.add_float32("k.f32", 0.5)
    writer.add_uint64("k.u64", 2**63 + 1)
    writer.add_int64("k.i64", -(2**62))
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.text", "é😊")
    writer.add_array("k.texts", ["a", "", "βγ"])
    writer.add_array("k.numbers", [1, -2, 3])
    writer.add_array("k.flags", [True, False])
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_of_tensor_types_equal_the_libraries():
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    for code, kind in GGML_TYPES.items():
        assert code not in theirs or theirs[code] == tuple(kind)
    assert {0, 1, 2, 3, 8, 30} <= set(theirs)


def test_all_value_types_and_tensors(tmp_path):
    path = _small_file(tmp_path / "a.gguf")
    header = read_gguf_header(path)
    meta = dict(header.metadata)
    assert meta["k.u8"] == 200
    assert meta["k.i8"] == -3
    assert meta["k.u16"] == 60000
    assert meta["k.i16"] == -30000
    assert meta["k.u32"] == 4_000_000_000
    assert meta["k.i32"] == -5
    assert meta["k.f32"] == 0.5
    assert meta["k.u64"] == 2**63 + 1
    assert meta["k.i64"] == -(2**62)
    assert meta["k.f64"] == 0.1
    assert meta["k.bool"] is True
    assert meta["k.text"] == "é😊"
    assert meta["k.texts"] == ["a", "", "βγ"]
    assert meta["k.numbers"].tolist() == [1, -2, 3]
    assert meta["k.flags"].tolist() == [True, False]
    assert header.version == 3
    a, b = header.tensors["a"], header.tensors["b"]
    assert a.shape == (3, 4)
    assert b.shape == (5,)
    data = path.read_bytes()
    assert np.frombuffer(data[a.start : a.end], "<f4").tolist() == list(range(12))
    assert np.frombuffer(data[b.start : b.end], "<f2").tolist() == list(range(5))


def test_the_embedded_model_equals_the_library_and_is_read_fast():
    path = embedded_model()
    gguf_header._read.cache_clear()
    start = time.process_time()
    header = read_gguf_header(path)
    assert time.process_time() - start < 2.0  # a deadline against a hang; usually 0.05 s
    assert len(header.tensors) == 272
    assert header.tensors["token_embd.weight"].shape == (49152, 576)
    assert header.tensors["token_embd.weight"].start == 1785664
    assert header.tensors["blk.0.attn_k.weight"].start == 33530176
    assert header.tensors["blk.0.attn_k.weight"].type.name == "Q4_1"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.metadata["tokenizer.ggml.merges"]) == 48900
    assert header.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert read_gguf_header(path) is header


def test_a_replaced_file_is_read_again(tmp_path):
    path = _small_file(tmp_path / "a.gguf")
    assert "k.u8" in read_gguf_header(path).metadata
    writer = gguf.GGUFWriter(path, "other")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_header(path).metadata == {"general.architecture": "other"}


def test_truncated_anywhere(tmp_path):
    path = _small_file(tmp_path / "a.gguf")
    header = read_gguf_header(path)
    data = path.read_bytes()
    end = max(tensor.end for tensor in header.tensors.values())
    for length in range(end):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as error:
            read_gguf_header(path)
        assert str(path) in str(error.value)


def test_truncated_embedded_model_names_the_tensor(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(embedded_model().read_bytes()[:50_000_000])
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.\d+\.\w+.*truncated"):
        read_gguf_header(path)


def _raw(num_tensors=0, num_values=0, rest=b"", version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def _text(text):
    return struct.pack("<Q", len(text)) + text


def _tensor(name=b"w", dims=(32,), kind=0, offset=0):
    numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return _text(name) + numbers


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (_raw(magic=b"GGML"), "no GGUF file"),
        (_raw(version=1), "version 1"),
        (_raw(version=3 << 24), "big-endian"),
        (_raw(num_tensors=2**60), "claims 1152921504606846976 tensors"),
        (_raw(num_values=2**60), "claims 1152921504606846976 metadata"),
        (_raw(num_values=1, rest=_text(b"k") + struct.pack("<I", 77)), "'k': has the unknown"),
        (
            _raw(num_values=1, rest=_text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)),
            "'k': claims 2305843009213693952 items",
        ),
        (
            _raw(num_values=1, rest=_text(b"k") + struct.pack("<IIQ", 9, 8, 1) + _text(b"\xff")),
            "'k': item 0 is not valid UTF-8",
        ),
        (
            _raw(
                num_values=1,
                rest=_text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**62) + b"abc",
            ),
            "'k': item 0 runs past",
        ),
        (
            _raw(num_values=2, rest=2 * (_text(b"k") + struct.pack("<II", 4, 1))),
            "'k': occurs twice",
        ),
        (
            _raw(
                num_values=1,
                rest=_text(b"general.alignment") + struct.pack("<II", 4, 3),
            ),
            "general.alignment is 3",
        ),
        (_raw(num_tensors=1, rest=_tensor(kind=5) + bytes(400)), "'w': has the unknown type 5"),
        (_raw(num_tensors=1, rest=_tensor(dims=(33,), kind=2) + bytes(400)), "rows of 33"),
        (_raw(num_tensors=1, rest=_tensor(dims=(1,) * 5) + bytes(400)), "has 5 dimensions"),
        (_raw(num_tensors=1, rest=_tensor(dims=(2**40,)) + bytes(400)), "'w': ends at byte"),
        (_raw(num_tensors=1, rest=_tensor(offset=8) + bytes(400)), "not a multiple of 32"),
        (
            _raw(num_tensors=2, rest=_tensor() + _tensor(b"v", offset=32) + bytes(400)),
            "'w' and 'v' overlap",
        ),
        (_raw(num_tensors=2, rest=_tensor() + _tensor() + bytes(400)), "'w': occurs twice"),
    ],
)
def test_faults_name_file_and_key(tmp_path, content, says):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as error:
        read_gguf_header(path)
    assert str(path) in str(error.value)


def test_deeply_nested_arrays_are_refused(tmp_path):
    path = tmp_path / "bad.gguf"
    nest = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(_raw(num_values=1, rest=_text(b"k") + struct.pack("<I", 9) + nest))
    with pytest.raises(CheckpointError, match="nests arrays"):
        read_gguf_header(path)


def _part(path, values, names):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        writer.add_uint16(f"split.{key}", value)
    for name in names:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(folder, *, changed=1, values=None, names=("a", "b")):
    """Two parts in `folder`; `values` change what part number `changed` says."""
    for place in range(2):
        keys = {"no": place, "count": 2, "tensors.count": 2}
        _part(
            folder / f"m-{place + 1:05}-of-00002.gguf",
            keys | ((values or {}) if place == changed else {}),
            [names[place]],
        )
    return folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"


def test_any_part_of_a_split_file_gives_the_whole(tmp_path):
    first, second = _parts(tmp_path)
    assert gguf_parts(first) == gguf_parts(second) == (first, second)
    for part in (first, second):
        header = read_gguf_header(part)
        assert header.path == first
        assert {name: t.path for name, t in header.tensors.items()} == {"a": first, "b": second}


def test_a_missing_part_is_named(tmp_path):
    first, second = _parts(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"of its 2 parts 1 are missing.*m-00002-of-00002"):
        read_gguf_header(first)


@pytest.mark.parametrize(
    ("changed", "values", "names", "says"),
    [
        (1, {"count": 3}, "ab", r"m-00002.*split.no=1, split.count=3.*must be split.no=1, .*=2"),
        (0, {"count": 3}, "ab", r"m-00001.*split.count=3.*must be split.no=0, split.count=2"),
        (1, {"no": 0}, "ab", r"m-00002.*split.no=0.*must be split.no=1"),
        (1, {}, "aa", r"'a' is in both .*m-00001.*m-00002"),
        (0, {"tensors.count": 3}, "ab", "split.tensors.count is 3, but its 2 parts hold 2"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, changed, values, names, says):
    """Case 38's rule for tensors: what the metadata say is checked."""
    first, _ = _parts(tmp_path, changed=changed, values=values, names=names)
    with pytest.raises(CheckpointError, match=says):
        read_gguf_header(first)


def test_a_part_under_another_name_is_no_whole_file(tmp_path):
    first, _ = _parts(tmp_path)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"split.count=2, but by its name .*-00001-of-0000N"):
        read_gguf_header(renamed)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_garbage_never_gives_another_error(tmp_path, data):
    path = tmp_path / "g.gguf"
    if not path.exists():
        _small_file(tmp_path / "whole")
    content = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    gguf_header._read.cache_clear()
    try:
        for tensor in read_gguf_header(path).tensors.values():
            assert 0 <= tensor.start <= tensor.end <= len(content)
    except CheckpointError:
        pass
