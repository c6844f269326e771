"""What the scheduler may put into a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue.

    max_num_seqs: rows (requests) in one step, and rows of persistent state.
    max_num_batched_tokens: tokens in one step, over all its rows.
    long_prefill_token_threshold: a longer chunk of one prompt is cut to this; 0 = off.
    max_scored_tokens: while answers are under way, so many prompt tokens in one step have their
        log-probabilities made: on a CPU that costs about as much as the layers do.
    chunks_prompts: whether a prompt may be computed over several steps; where its tokens all see
        each other it may not, and waits for a step that has room for all of it.
    policy: a name from core/policy.py.
    max_steps_in_flight: launched steps whose results are not yet known.
    num_stages: of a pipeline. With more than one, a row is scheduled when its last token is known,
        and a step holds a share of the rows, so that every stage has one.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    max_scored_tokens: int = 512
    chunks_prompts: bool = True
    policy: str = "fcfs"
    max_steps_in_flight: int = 2
    num_stages: int = 1
