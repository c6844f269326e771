import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pelton.checkpoint.hf_config import read_model_config
from pelton.checkpoint.name_map import NameRules, Rule
from pelton.checkpoint.source import Checkpoint, resolve_checkpoint
from pelton.errors import CheckpointError, ConfigError
from pelton.layers.parameter import Parameter, shard, vocab_shard, whole
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF
from pelton.weights.loader import load_weights
from pelton.weights.safetensors import SafetensorsSource
from pelton.weights.source import open_source

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 45


def _parameters(model, rank=0, size=1, dtype=torch.float32):
    """A Llama's parameters as the layers will cut them. Tensors start as NaN."""
    hidden, inner, head_dim = model.hidden_size, model.intermediate_size, model.head_dim
    query, kv = model.num_heads * head_dim, model.num_kv_heads * head_dim
    parameters = {}

    def add(name, parts):
        columns = next(iter(parts.values())).source_shape[1:]
        if next(iter(parts.values())).dim == 1:
            columns = (next(iter(parts.values())).size,)
        rows = sum(part.dst_size for part in parts.values())
        tensor = torch.full((rows, *columns), float("nan"), dtype=dtype)
        parameters[name] = Parameter(tensor, parts)

    def fused(name, kinds, columns=()):
        parts, at = {}, 0
        for kind, rows, unit in kinds:
            parts[kind] = shard(
                (rows, *columns), rank, size, unit=unit, dst_start=at, may_replicate=True
            )
            at += parts[kind].dst_size
        add(name, parts)

    qkv = (("q", query, head_dim), ("k", kv, head_dim), ("v", kv, head_dim))
    gate_up = (("gate", inner, 1), ("up", inner, 1))
    add("embed.weight", {None: vocab_shard((model.vocab_size, hidden), rank, size)})
    if not model.tie_word_embeddings:
        add("head.weight", {None: vocab_shard((model.vocab_size, hidden), rank, size)})
    add("norm.weight", {None: whole((hidden,))})
    for i in range(model.num_layers):
        at = f"layers.{i}"
        add(f"{at}.input_norm.weight", {None: whole((hidden,))})
        add(f"{at}.post_norm.weight", {None: whole((hidden,))})
        fused(f"{at}.qkv.weight", qkv, (hidden,))
        fused(f"{at}.gate_up.weight", gate_up, (hidden,))
        add(f"{at}.o.weight", {None: shard((hidden, query), rank, size, dim=1)})
        add(f"{at}.down.weight", {None: shard((hidden, inner), rank, size, dim=1)})
        if model.attention_bias:
            fused(f"{at}.qkv.bias", qkv)
            add(f"{at}.o.bias", {None: whole((hidden,))})
        if model.mlp_bias:
            fused(f"{at}.gate_up.bias", gate_up)
            add(f"{at}.down.bias", {None: whole((hidden,))})
    return parameters


def _load(checkpoint, rules, *, rank=0, size=1, dtype=torch.float32, seed=0):
    model = read_model_config(checkpoint)
    parameters = _parameters(model, rank, size, dtype)
    source = open_source(checkpoint, parameters, rules, seed=seed)
    report = load_weights(parameters, source, rules, head_dim=model.head_dim)
    return parameters, report


def _hf_model(tmp_path, *, shard_size="50GB", **changes):
    torch.manual_seed(7)
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    return model.state_dict(), resolve_checkpoint(str(tmp_path))


def _tensors(parameters):
    return {name: parameter.tensor for name, parameter in parameters.items()}


def _expected(state, *, biases=False):
    """Full tensors under our names, put together by hand from transformers' state."""
    result = {
        "embed.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if biases else ("weight",):
            attention = [state[f"{theirs}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            mlp = [state[f"{theirs}.mlp.{x}_proj.{kind}"] for x in ("gate", "up")]
            result[f"{ours}.qkv.{kind}"] = torch.cat(attention)
            result[f"{ours}.gate_up.{kind}"] = torch.cat(mlp)
            result[f"{ours}.o.{kind}"] = state[f"{theirs}.self_attn.o_proj.{kind}"]
            result[f"{ours}.down.{kind}"] = state[f"{theirs}.mlp.down_proj.{kind}"]
        result[f"{ours}.input_norm.weight"] = state[f"{theirs}.input_layernorm.weight"]
        result[f"{ours}.post_norm.weight"] = state[f"{theirs}.post_attention_layernorm.weight"]
    return result


def _assert_equal(ours, expected):
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("shard_size", ["50GB", "8KB"])
def test_transformers_checkpoint(tmp_path, shard_size):
    state, checkpoint = _hf_model(
        tmp_path, shard_size=shard_size, attention_bias=True, mlp_bias=True
    )
    assert (len(checkpoint.files) > 1) == (shard_size == "8KB")
    parameters, report = _load(checkpoint, LLAMA_HF)
    expected = _expected(state, biases=True)
    expected["head.weight"] = state["lm_head.weight"]
    _assert_equal(_tensors(parameters), expected)
    assert report.num_tensors == len(state)
    assert report.num_bytes == sum(p.tensor.nbytes for p in parameters.values())
    assert all(set(p.filled.values()) == {"loaded"} for p in parameters.values())


def _joined(shards, kv_heads=KV_HEADS):
    """The full tensors from all ranks' shards."""
    size, result = len(shards), {}
    for name, first in shards[0].items():
        tensors = [s[name].tensor for s in shards]
        if "norm" in name or name.endswith(("o.bias", "down.bias")):
            assert all(torch.equal(t, tensors[0]) for t in tensors)
            result[name] = tensors[0]
        elif name.endswith(("o.weight", "down.weight")):
            result[name] = torch.cat(tensors, dim=1)
        else:
            pieces = []
            for kind in first.parts:
                each = [s[name].part_tensor(kind) for s in shards]
                copies = max(size // kv_heads, 1) if kind in ("k", "v") else 1
                for i in range(0, size, copies):
                    assert all(torch.equal(each[i], each[i + j]) for j in range(copies))
                pieces += each[::copies]
            result[name] = torch.cat(pieces)
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_shards_joined_are_the_full_tensor(tmp_path, size):
    """With 4 ranks and 2 KV heads, each KV head is on two ranks; 45 tokens do not divide evenly."""
    state, checkpoint = _hf_model(tmp_path, attention_bias=True, mlp_bias=True)
    shards = [_load(checkpoint, LLAMA_HF, rank=r, size=size)[0] for r in range(size)]
    expected = _expected(state, biases=True)
    expected["head.weight"] = state["lm_head.weight"]
    _assert_equal(_joined(shards), expected)


def test_a_cut_that_does_not_divide():
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 cannot cut"):
        shard((48, 32), 0, 4, unit=8)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 cannot cut"):
        shard((48, 32), 0, 4, unit=24)  # replicated query heads would be summed twice
    assert shard((48, 32), 3, 4, unit=24, may_replicate=True).start == 24
    assert vocab_shard((5, 2), 3, 4).size == 0


def test_chunked_reading_equals_the_whole(tmp_path, monkeypatch):
    _, checkpoint = _hf_model(tmp_path)
    whole_load = _tensors(_load(checkpoint, LLAMA_HF)[0])
    monkeypatch.setattr("pelton.weights.loader._CHUNK", 70)
    _assert_equal(_tensors(_load(checkpoint, LLAMA_HF)[0]), whole_load)


def _permuted(tensor, heads):
    """The order of rows in Llama's GGUF files: the two halves of each head interleaved."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, 2, half, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _gguf_model(path, state):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    for rule in LLAMA_HF.rules:
        other = next(r for r in LLAMA_GGUF.rules if (r.target, r.part) == (rule.target, rule.part))
        for i in range(LAYERS if "{i}" in rule.source else 1):
            name = rule.source.replace("{i}", str(i))
            if name in state:
                tensor = state[name]
                if other.transform == "unpermute":
                    tensor = _permuted(tensor, HEADS if rule.part == "q" else KV_HEADS)
                writer.add_tensor(other.source.replace("{i}", str(i)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve_checkpoint(str(path))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [10, 10**6])
def test_gguf_rows_are_unpermuted(tmp_path, size, chunk, monkeypatch):
    monkeypatch.setattr("pelton.weights.loader._CHUNK", chunk)
    state, _ = _hf_model(tmp_path, attention_bias=True, mlp_bias=True)
    checkpoint = _gguf_model(tmp_path / "m.gguf", state)
    shards = [_load(checkpoint, LLAMA_GGUF, rank=r, size=size)[0] for r in range(size)]
    expected = _expected(state, biases=True)
    expected["head.weight"] = state["lm_head.weight"]
    _assert_equal(_joined(shards), expected)


def test_the_embedded_model_loads_whole_and_rounds_once():
    checkpoint = resolve_checkpoint(None)
    exact, report = _load(checkpoint, LLAMA_GGUF, dtype=torch.float32)
    rounded, _ = _load(checkpoint, LLAMA_GGUF, dtype=torch.bfloat16)
    assert report.num_tensors == 272
    assert report.dropped == ()
    for name, parameter in exact.items():
        assert parameter.tensor.isfinite().all()
        assert torch.equal(rounded[name].tensor, parameter.tensor.bfloat16())


@pytest.mark.long
def test_the_embedded_model_equals_transformers_reading_of_it():
    checkpoint = resolve_checkpoint(None)
    parameters, _ = _load(checkpoint, LLAMA_GGUF)
    state = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, gguf_file=checkpoint.files[0].name, dtype=torch.float32
    ).state_dict()
    for i in (0, 29):
        qkv = torch.cat([state[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(parameters[f"layers.{i}.qkv.weight"].tensor, qkv)
        down = state[f"model.layers.{i}.mlp.down_proj.weight"]
        assert torch.equal(parameters[f"layers.{i}.down.weight"].tensor, down)
    assert torch.equal(parameters["embed.weight"].tensor, state["model.embed_tokens.weight"])


def test_tied_head_is_dropped_when_equal_and_refused_when_not(tmp_path):
    state, checkpoint = _hf_model(tmp_path, tie_word_embeddings=True)
    parameters, report = _load(checkpoint, LLAMA_HF)
    assert "head.weight" not in parameters
    file = checkpoint.files[0]
    tensors = {name: tensor.clone() for name, tensor in state.items()}
    save_file(tensors, file)
    _, report = _load(checkpoint, LLAMA_HF)
    assert report.dropped == ("lm_head.weight",)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"tied to: lm_head\.weight and model\.embed_tokens"):
        _load(checkpoint, LLAMA_HF)


@pytest.fixture
def broken(tmp_path):
    """Loads a checkpoint whose tensors a function has changed."""
    state, checkpoint = _hf_model(tmp_path)

    def inner(change, parameters=None):
        tensors = {name: tensor.clone() for name, tensor in state.items()}
        change(tensors)
        save_file(tensors, checkpoint.files[0])
        parameters = parameters or _parameters(read_model_config(checkpoint))
        source = SafetensorsSource(checkpoint.files)
        try:
            return load_weights(parameters, source, LLAMA_HF, head_dim=HEAD_DIM)
        except CheckpointError:
            assert all(p.tensor.isnan().all() for p in parameters.values()), "read before refusal"
            raise

    return inner


Q0 = "model.layers.0.self_attn.q_proj.weight"


def test_missing(broken):
    with pytest.raises(CheckpointError, match=r"1 missing: layers\.0\.qkv\.weight \(q\)"):
        broken(lambda tensors: tensors.pop(Q0))


def test_unexpected(broken):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(8)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)

    with pytest.raises(CheckpointError, match="3 unexpected: ") as error:
        broken(change)
    for name in ("q_norm.weight", "model.layers.2.mlp.up_proj.weight", "q_proj.bias"):
        assert name in str(error.value)


def test_wrong_shape(broken):
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight \(file \(31, 32\), model \(32, 32\)\)"
    ):
        broken(lambda tensors: tensors.update({Q0: torch.ones(31, 32)}))


def test_all_problems_at_once_and_long_lists_are_cut(broken):
    def change(tensors):
        tensors.update({f"odd.{i}": torch.ones(1) for i in range(20)})
        tensors.pop(Q0)

    with pytest.raises(CheckpointError, match=r"20 unexpected: .*and 12 more; 1 missing"):
        broken(change)


def test_ignored_buffers_are_reported(broken):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert broken(lambda tensors: tensors.update({name: torch.ones(4)})).dropped == (name,)


def test_initialised_on_purpose_is_not_missing_but_not_loaded_either(broken, tmp_path):
    model = read_model_config(resolve_checkpoint(str(tmp_path)))
    parameters = _parameters(model)
    parameters["norm.weight"].mark(None, "initialised")
    report = broken(lambda tensors: tensors.pop("model.norm.weight"), parameters)
    assert report.num_tensors == 2 * 9 + 2
    again = _parameters(model)
    again["norm.weight"].mark(None, "initialised")
    with pytest.raises(CheckpointError, match=r"loaded twice: norm\.weight from model\.norm"):
        broken(lambda tensors: None, again)


def test_loaded_twice(broken, tmp_path):
    parameters = _parameters(read_model_config(resolve_checkpoint(str(tmp_path))))
    broken(lambda tensors: None, parameters)
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    with pytest.raises(CheckpointError, match=r"21 loaded twice: .*, but it is loaded already"):
        load_weights(parameters, source, LLAMA_HF, head_dim=HEAD_DIM)
    with pytest.raises(AssertionError, match="loaded already"):
        parameters["norm.weight"].mark(None, "replaced")


def test_two_names_for_one_part():
    class Twice:
        def names(self):
            return ["a", "b"]

        def shape(self, name):
            return (2,)

    rules = NameRules((Rule("a", "w"), Rule("b", "w")))
    parameters = {"w": Parameter(torch.empty(2), {None: whole((2,))})}
    with pytest.raises(CheckpointError, match="1 loaded twice: w from a and b"):
        load_weights(parameters, Twice(), rules, head_dim=2)


def _dummy(tmp_path, **changes) -> Checkpoint:
    _hf_model(tmp_path, **changes)
    return resolve_checkpoint(str(tmp_path), load_format="dummy")


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_is_cut_from_the_same_full_tensors(tmp_path, size):
    checkpoint = _dummy(tmp_path, attention_bias=True, mlp_bias=True)
    full = _tensors(_load(checkpoint, LLAMA_HF, seed=5)[0])
    shards = [_load(checkpoint, LLAMA_HF, rank=r, size=size, seed=5)[0] for r in range(size)]
    _assert_equal(_joined(shards), full)


def test_dummy_values(tmp_path, monkeypatch):
    checkpoint = _dummy(tmp_path, hidden_size=256, num_attention_heads=32, num_key_value_heads=32)
    full = _tensors(_load(checkpoint, LLAMA_HF, seed=5)[0])
    weight = full["layers.1.qkv.weight"]
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean()) < 2e-4
    assert full["norm.weight"].eq(1).all()
    assert not torch.equal(full["layers.0.qkv.weight"], weight)
    other = _tensors(_load(checkpoint, LLAMA_HF, seed=6)[0])
    assert not torch.equal(other["embed.weight"], full["embed.weight"])
    monkeypatch.setattr("pelton.weights.loader._CHUNK", 1001)
    _assert_equal(_tensors(_load(checkpoint, LLAMA_HF, seed=5)[0]), full)
