"""Granite 4's weight names in Hugging Face checkpoints. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import LLAMA_HF

_LAYER = "model.layers.{i}"
_MAMBA = f"{_LAYER}.mamba"
_MOE = f"{_LAYER}.block_sparse_moe"
_OURS, _EXPERTS = "layers.{i}.mamba", "layers.{i}.experts"
_PROJECTED = ("gate", "x", "B", "C", "dt")

GRANITE_HYBRID_HF = NameRules(
    rules=(
        *(rule for rule in LLAMA_HF.rules if ".mlp." not in rule.source),
        Rule(
            f"{_LAYER}.shared_mlp.input_linear.weight",
            "layers.{i}.gate_up.weight",
            ("gate", "up"),
        ),
        Rule(f"{_LAYER}.shared_mlp.output_linear.weight", "layers.{i}.down.weight"),
        # As published; and as transformers 5 has them in memory.
        Rule(f"{_MOE}.router.layer.weight", f"{_EXPERTS}.router.weight"),
        Rule(f"{_MOE}.input_linear.weight", f"{_EXPERTS}.gate_up.weight", ("gate.{e}", "up.{e}")),
        Rule(f"{_MOE}.output_linear.weight", f"{_EXPERTS}.down.weight", "{e}"),
        Rule(f"{_MOE}.router.weight", f"{_EXPERTS}.router.weight"),
        Rule(f"{_MOE}.experts.gate_up_proj", f"{_EXPERTS}.gate_up.weight", ("gate.{e}", "up.{e}")),
        Rule(f"{_MOE}.experts.down_proj", f"{_EXPERTS}.down.weight", "{e}"),
        Rule(f"{_MAMBA}.in_proj.weight", f"{_OURS}.project.weight", _PROJECTED),
        Rule(f"{_MAMBA}.in_proj.bias", f"{_OURS}.project.bias", _PROJECTED),
        Rule(f"{_MAMBA}.conv1d.weight", f"{_OURS}.conv.weight", _PROJECTED[1:4]),
        Rule(f"{_MAMBA}.conv1d.bias", f"{_OURS}.conv.bias", _PROJECTED[1:4]),
        Rule(f"{_MAMBA}.A_log", f"{_OURS}.a_log"),
        Rule(f"{_MAMBA}.D", f"{_OURS}.d"),
        Rule(f"{_MAMBA}.dt_bias", f"{_OURS}.dt_bias"),
        Rule(f"{_MAMBA}.norm.weight", f"{_OURS}.gated_norm.weight"),
        Rule(f"{_MAMBA}.out_proj.weight", f"{_OURS}.out.weight"),
        Rule(f"{_MAMBA}.out_proj.bias", f"{_OURS}.out.bias"),
    ),
)
