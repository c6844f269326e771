"""penalties(logits, tokens, prompt_len, num_tokens, repetition, frequency, presence), in place.

logits: [N, V] float32. tokens: [N, W] int32, each row's request from its first token on, of which
num_tokens [N] int32 come before the one to be drawn and prompt_len [N] int32 are the prompt; the
rest of a row, and ids outside [0, V), count for nothing.
repetition, frequency, presence: [N] float32; 1, 0 and 0 leave every bit of a row as it is.

    a token in prompt or output:  logit / repetition if positive, else logit * repetition
    then, with its count in the output:  logit - frequency * count - presence * (count > 0)

Sources: Keskar et al., arXiv 1909.05858 (repetition); OpenAI's API reference (the other two).
Counts are exact, so a row's result does not depend on N or W.
"""

from pelton.ops.penalties.reference import penalties

__all__ = ["KERNELS", "penalties"]

KERNELS = {"cuda": "pelton.ops.penalties.triton:penalties"}
