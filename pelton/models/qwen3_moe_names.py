"""Qwen 3 MoE's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.qwen3_names import QWEN3_GGUF, QWEN3_HF

_MLP, _EXPERTS = "model.layers.{i}.mlp", "layers.{i}.experts"

QWEN3_MOE_HF = NameRules(
    rules=(
        *QWEN3_HF.rules,
        Rule(f"{_MLP}.gate.weight", f"{_EXPERTS}.router.weight"),
        # As published, a tensor per expert; and as transformers 5 has it in memory, in stacks.
        Rule(f"{_MLP}.experts.{{e}}.gate_proj.weight", f"{_EXPERTS}.gate_up.weight", "gate.{e}"),
        Rule(f"{_MLP}.experts.{{e}}.up_proj.weight", f"{_EXPERTS}.gate_up.weight", "up.{e}"),
        Rule(f"{_MLP}.experts.{{e}}.down_proj.weight", f"{_EXPERTS}.down.weight", "{e}"),
        Rule(f"{_MLP}.experts.gate_up_proj", f"{_EXPERTS}.gate_up.weight", ("gate.{e}", "up.{e}")),
        Rule(f"{_MLP}.experts.down_proj", f"{_EXPERTS}.down.weight", "{e}"),
    ),
)

# In stacks; newer converters can put gate and up together.
EXPERTS_GGUF = (
    Rule("blk.{i}.ffn_gate_inp.weight", f"{_EXPERTS}.router.weight"),
    Rule("blk.{i}.ffn_gate_exps.weight", f"{_EXPERTS}.gate_up.weight", "gate.{e}"),
    Rule("blk.{i}.ffn_up_exps.weight", f"{_EXPERTS}.gate_up.weight", "up.{e}"),
    Rule("blk.{i}.ffn_gate_up_exps.weight", f"{_EXPERTS}.gate_up.weight", ("gate.{e}", "up.{e}")),
    Rule("blk.{i}.ffn_down_exps.weight", f"{_EXPERTS}.down.weight", "{e}"),
)

QWEN3_MOE_GGUF = NameRules(rules=(*QWEN3_GGUF.rules, *EXPERTS_GGUF))
