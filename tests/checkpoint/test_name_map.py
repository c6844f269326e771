import pytest

from pelton.checkpoint.name_map import NameMap, NameRules, Rule
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


def test_layers_are_matched_by_index():
    match = NameMap(LLAMA_HF).match("model.layers.17.self_attn.k_proj.weight")
    assert match is not None
    assert match.rule is not None
    assert (match.target, match.rule.part) == ("layers.17.qkv.weight", "k")


def test_gguf_query_and_key_are_unpermuted_and_value_is_not():
    names = NameMap(LLAMA_GGUF)
    transforms = {
        name: names.match(f"blk.3.attn_{name}.weight").rule.transform for name in ("q", "k", "v")
    }
    assert transforms == {"q": "unpermute", "k": "unpermute", "v": None}


def test_ignored_names():
    match = NameMap(LLAMA_HF).match("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert match == (None, None, None)
    assert NameMap(LLAMA_GGUF).match("rope_freqs.weight") == (None, None, None)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.x.self_attn.q_proj.weight",
        "model.layers.01.self_attn.q_proj.weight",
        "model.layers.-1.self_attn.q_proj.weight",
        "model.layers.1.2.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.q_proj.weights",
        "xmodel.norm.weight",
        "",
    ],
)
def test_unknown_names(name):
    assert NameMap(LLAMA_HF).match(name) is None


def test_a_fixed_number_in_a_name_is_no_layer():
    names = NameMap(NameRules((Rule("a.0.{i}.w", "b.{i}"), Rule("a.0.w", "c"))))
    assert names.match("a.0.5.w").target == "b.5"
    assert names.match("a.0.w").target == "c"
    assert names.match("a.1.5.w") is None


def test_two_rules_for_a_name_are_a_bug():
    with pytest.raises(AssertionError, match="two rules"):
        NameMap(NameRules((Rule("a", "b"),), ignored=("a",)))


def test_experts_are_matched_behind_their_layer():
    rule = Rule("m.{i}.experts.{e}.up.weight", "layers.{i}.gate_up", "up.{e}")
    names = NameMap(NameRules((rule,)))
    match = names.match("m.3.experts.12.up.weight")
    assert (match.target, match.expert) == ("layers.3.gate_up", 12)
    assert match.rule.parts(match.expert) == ("up.12",)
    assert names.match("m.3.experts.x.up.weight") is None
    assert names.match("m.experts.12.up.weight") is None
    assert not rule.is_stacked


def test_a_stack_is_a_rule_whose_parts_alone_have_the_expert():
    rule = Rule("m.{i}.experts", "layers.{i}.gate_up", ("gate.{e}", "up.{e}"))
    assert rule.is_stacked
    assert rule.parts(2) == ("gate.2", "up.2")
    assert not Rule("a", "b", ("gate", "up")).is_stacked
    assert not Rule("a", "b").is_stacked
