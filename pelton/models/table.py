"""Model families by the architecture name of config.json."""

MODELS: dict[str, str] = {
    "BertModel": "pelton.models.bert:Bert",
    "Gemma2ForCausalLM": "pelton.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "pelton.models.gemma3:Gemma3",
    "GptOssForCausalLM": "pelton.models.gpt_oss:GptOss",
    "GraniteForCausalLM": "pelton.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "pelton.models.granite_hybrid:GraniteHybrid",
    "LlamaForCausalLM": "pelton.models.llama:Llama",
    "MinistralForCausalLM": "pelton.models.ministral:Ministral",
    "MistralForCausalLM": "pelton.models.mistral:Mistral",
    "ModernBertModel": "pelton.models.modernbert:ModernBert",
    "Olmo2ForCausalLM": "pelton.models.olmo2:Olmo2",
    "OlmoeForCausalLM": "pelton.models.olmoe:Olmoe",
    "Phi3ForCausalLM": "pelton.models.phi3:Phi3",
    "Qwen2ForCausalLM": "pelton.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "pelton.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "pelton.models.qwen3_moe:Qwen3Moe",
    "RobertaModel": "pelton.models.roberta:Roberta",
    "XLMRobertaModel": "pelton.models.roberta:Roberta",
}


def register(architecture: str, target: str) -> None:
    """Add a family from outside the tree; `target` is "module:Class"."""
    MODELS[architecture] = target
