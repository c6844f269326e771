"""GPT-OSS's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import GGUF_IN_ORDER, LLAMA_HF
from pelton.models.qwen3_moe_names import EXPERTS_GGUF

_MLP, _EXPERTS = "model.layers.{i}.mlp", "layers.{i}.experts"
_GATE_UP = ("gate.{e}", "up.{e}")

GPT_OSS_HF = NameRules(
    rules=(
        *(rule for rule in LLAMA_HF.rules if ".mlp." not in rule.source),
        Rule("model.layers.{i}.self_attn.sinks", "layers.{i}.sinks"),
        Rule(f"{_MLP}.router.weight", f"{_EXPERTS}.router.weight"),
        Rule(f"{_MLP}.router.bias", f"{_EXPERTS}.router.bias"),
        Rule(
            f"{_MLP}.experts.gate_up_proj",
            f"{_EXPERTS}.gate_up.weight",
            _GATE_UP,
            "transpose",
            interleaved=True,
        ),
        Rule(
            f"{_MLP}.experts.gate_up_proj_bias",
            f"{_EXPERTS}.gate_up.bias",
            _GATE_UP,
            interleaved=True,
        ),
        Rule(f"{_MLP}.experts.down_proj", f"{_EXPERTS}.down.weight", "{e}", "transpose"),
        Rule(f"{_MLP}.experts.down_proj_bias", f"{_EXPERTS}.down.bias", "{e}"),
        # In MXFP4 a block lies along a row, so these matrices are not transposed.
        Rule(
            f"{_MLP}.experts.gate_up_proj_blocks",
            f"{_EXPERTS}.gate_up.weight",
            _GATE_UP,
            interleaved=True,
        ),
        Rule(f"{_MLP}.experts.down_proj_blocks", f"{_EXPERTS}.down.weight", "{e}"),
    ),
)

GPT_OSS_GGUF = NameRules(
    rules=(
        *(rule for rule in GGUF_IN_ORDER.rules if ".ffn_" not in rule.source),
        *EXPERTS_GGUF,
        Rule("blk.{i}.post_attention_norm.weight", "layers.{i}.post_norm.weight"),
        Rule("blk.{i}.attn_sinks.weight", "layers.{i}.sinks"),
        Rule("blk.{i}.ffn_gate_inp.bias", f"{_EXPERTS}.router.bias"),
        Rule("blk.{i}.ffn_gate_exps.bias", f"{_EXPERTS}.gate_up.bias", "gate.{e}"),
        Rule("blk.{i}.ffn_up_exps.bias", f"{_EXPERTS}.gate_up.bias", "up.{e}"),
        Rule("blk.{i}.ffn_gate_up_exps.bias", f"{_EXPERTS}.gate_up.bias", _GATE_UP),
        Rule("blk.{i}.ffn_down_exps.bias", f"{_EXPERTS}.down.bias", "{e}"),
    ),
)
