"""The least that a step must do: bytes to read, operations to carry out."""

from __future__ import annotations

from pelton.config.engine import EngineConfig
from pelton.config.model import ModelConfig
from pelton.config.quant import QuantConfig
from pelton.core.kv.spec import page_bytes_of

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _layers_elements(c: ModelConfig) -> int:
    """Of all layers. Sparse ones count as many experts as a token uses: all tokens of a step may
    use the same."""
    attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
    dense = 3 * c.hidden_size * c.intermediate_size
    used = c.moe_intermediate_size * c.experts_per_token + c.shared_intermediate_size
    sparse = 3 * c.hidden_size * used
    router = c.num_experts * c.hidden_size
    mlps = (sparse + router if c.is_sparse(i) else dense for i in range(c.num_layers))
    recurrent = 0
    if c.mamba2 is not None:
        recurrent = c.hidden_size * (c.mamba2.projected_size + c.mamba2.inner_size)
    num_attention = _num_attention_layers(c)
    mixers = num_attention * attention + (c.num_layers - num_attention) * recurrent
    return mixers + sum(mlps)


def dense_layer_products(c: ModelConfig) -> dict[str, int]:
    """Elements of the matrices of a layer without experts, in the order of their products."""
    width = c.head_dim * c.hidden_size
    return {
        "qkv": (c.num_heads + 2 * c.num_kv_heads) * width,
        "o": c.num_heads * width,
        "gate_up": 2 * c.hidden_size * c.intermediate_size,
        "down": c.hidden_size * c.intermediate_size,
    }


def _num_attention_layers(c: ModelConfig) -> int:
    return c.num_layers - c.layer_kinds.count("recurrent")


NOTHING_QUANTISED = QuantConfig()


def weight_bytes(
    config: ModelConfig, dtype: str, quantised: QuantConfig = NOTHING_QUANTISED
) -> int:
    """Bytes of weights that one decode step reads: every product's matrix once, the head included
    and the embedding's few rows not. Of quantised ones there may be more than are read (that
    embedding): then they count in proportion."""
    read = _layers_elements(config) + config.vocab_size * config.hidden_size
    share = min(read / quantised.num_elements, 1.0) if quantised.num_elements else 0.0
    packed = round(share * quantised.num_elements)
    return (read - packed) * ELEMENT_BYTES[dtype] + round(share * quantised.num_bytes)


def bytes_per_element(config: EngineConfig) -> float:
    """Of the weights that a decode step reads, on average."""
    num_elements = weight_bytes(config.model, "float32") // ELEMENT_BYTES["float32"]
    return weight_bytes(config.model, config.dtype, config.quantization) / num_elements


def kv_bytes(config: ModelConfig, kv_dtype: str, num_tokens: int) -> int:
    """Bytes of keys and values of `num_tokens` tokens, over all attention layers."""
    return _num_attention_layers(config) * page_bytes_of(
        kv_dtype,
        block_size=num_tokens,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def decode_bytes(
    config: ModelConfig,
    dtype: str,
    *,
    kv_dtype: str,
    batch_size: int,
    input_len: int,
    output_len: int,
    quantised: QuantConfig = NOTHING_QUANTISED,
) -> float:
    """Bytes read by the average decode step of rows that grow from input_len by output_len tokens:
    steps attend to input_len + 1 .. input_len + output_len - 1 tokens."""
    mean_len = input_len + output_len / 2
    weights = weight_bytes(config, dtype, quantised)
    return weights + batch_size * mean_len * kv_bytes(config, kv_dtype, 1)


def prefill_flops(config: ModelConfig, *, batch_size: int, input_len: int) -> float:
    """Operations (a multiply-add counts two) of a prefill: products of all tokens, causal
    attention, and the head for each row's last token; recurrences are left out."""
    products = 2 * _layers_elements(config) * input_len
    pairs = input_len * (input_len + 1) / 2
    attention = 4 * _num_attention_layers(config) * config.num_heads * config.head_dim * pairs
    head = 2 * config.vocab_size * config.hidden_size
    return batch_size * (products + attention + head)
