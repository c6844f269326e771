"""What others reach on the same work, what the hardware allows, and what Pelton is to reach.

Measured by scripts outside this repository, as the source of each table says; a results file that
claims more than these figures can carry should measure the peer again, in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

# A ratio of 0.95 counts as equal where the goal is to be no slower.
EQUAL = 0.95


@dataclass(frozen=True, slots=True)
class Figure:
    """peer: the peer's figure; floor: what the hardware allows; goal: Pelton's, None = no slower
    than the peer, if there is one. All in the case's unit; 0 = not known."""

    peer: float = 0.0
    floor: float = 0.0
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """name: of the engine, with its version. source: hardware, versions, date, and what was done.
    figures: by the name of a suite's row."""

    name: str
    source: str
    figures: dict[str, Figure]


_VLLM_GPU = (
    "One NVIDIA H200 (copy 4.295 TB/s, weight reads 4.154 TB/s, bfloat16 678 TFLOP/s sustained), "
    "vLLM 0.25.0 (V2 runner, FlashAttention-3, full and piecewise graphs, torch.compile), torch "
    "2.11.0+cu130, Triton 3.6.0; random bfloat16 weights, random token ids, greedy, end of "
    "sequence ignored, prefix cache off; medians, 2026-11-30. Floors: bytes over the read rate, "
    "operations over the sustained rate."
)
_CPU_MACHINE = (
    "2-core Intel Xeon (Sapphire Rapids class, AVX-512 and AMX), torch 2.13.0, machine quiet, "
    "random token ids, greedy, end of sequence ignored, prefix cache off, 2026-11."
)

_FLOORS = (
    "No peer; floors of one NVIDIA H200, as above: bytes of weights, keys and values over the read "
    "rate, operations over the sustained rate."
)

# subject -> the peer that it is compared with
PEERS: dict[str, Peer] = {
    "qwen3-8b": Peer(
        "vLLM 0.25.0",
        _VLLM_GPU,
        {
            "decode1": Figure(5.20, 3.53, 4.4),
            "decode1_4k": Figure(5.36, 3.67),
            "first_token": Figure(13.9, 3.5, 7.0),
            "decode8": Figure(5.53, 3.59),
            "decode32": Figure(5.71, 3.80),
            "decode64": Figure(6.28, 4.09),
            "decode128": Figure(7.77, 4.65),
            "decode256": Figure(11.88, 5.77, 10.5),
            "offline": Figure(29092, 34300, 29500),
            "prefill": Figure(40346, 46400),
            "start_cold": Figure(70, goal=15),
            "start_warm": Figure(42, goal=6),
        },
    ),
    "8b-32k": Peer(
        "",
        _FLOORS,
        {"decode1_32k": Figure(floor=4.69), "decode8_32k": Figure(floor=12.9)},
    ),
    "8b-invariant": Peer(
        "",
        _FLOORS,
        {
            "decode1": Figure(floor=3.53),
            "decode64": Figure(floor=4.09),
            "prefill": Figure(floor=46400),
        },
    ),
    "qwen3-0.6b": Peer(
        "vLLM 0.25.0",
        _VLLM_GPU,
        {
            "decode1": Figure(1.65, 0.28, 0.8),
            "first_token": Figure(8.0, goal=3.0),
            "decode8": Figure(1.63, 0.33, 1.1),
            "decode32": Figure(2.17, 0.50, 1.7),
            "decode64": Figure(2.50, 0.72, 2.1),
            "decode128": Figure(3.65, 1.15, 3.1),
            "decode256": Figure(4.97, 2.03, 4.4),
            "offline": Figure(96384, 133000, 105000),
            "prefill": Figure(350402, 518000),
            "start_cold": Figure(64, goal=15),
            "start_warm": Figure(39, goal=6),
        },
    ),
    "qwen3-30b-a3b": Peer(
        "vLLM 0.25.0",
        _VLLM_GPU + " Triton fused MoE with the table tuned for the H200.",
        {
            "decode1": Figure(4.13, 1.6, 3.2),
            "first_token": Figure(22.5),
            "decode64": Figure(17.9, 13.5),
            "prefill": Figure(64325),
        },
    ),
    "smollm2-bf16": Peer(
        "vLLM 0.32 CPU",
        _CPU_MACHINE,
        {
            "batch1": Figure(26, 104, 2.5 * 26),
            "batch32": Figure(334, 1270, 2.2 * 334),
            "batch64": Figure(441, 1980, 2.2 * 441),
            "prefill": Figure(1384, 9000, 2 * 2188),
            "start_warm": Figure(106),
        },
    ),
    "smollm2-q4_1": Peer(
        "llama.cpp, AVX-512",
        _CPU_MACHINE,
        {
            "batch1": Figure(80, 500, 2.5 * 80),
            "batch32": Figure(43),
            "prefill": Figure(164),
        },
    ),
}
