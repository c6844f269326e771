"""A tiny random Llama, an engine over it, and the plain reference: what most tests run on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.folders import new_folder

from pelton.checkpoint.hf_config import read_generation_defaults, read_model_config
from pelton.checkpoint.source import Checkpoint, resolve_checkpoint
from pelton.config.cache import CacheConfig
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.config.scheduler import SchedulerConfig
from pelton.core.descriptor import Descriptor
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.request import Request
from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice
from pelton.device.protocol import Device
from pelton.engine.loop import EngineLoop
from pelton.setup.pooling import decide_pooling
from pelton.worker.worker import Worker

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@functools.cache
def tiny_llama(**overrides: Any) -> Path:
    """A folder with a 2-layer random Llama in float32, weights large enough that tokens differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if "rope" in overrides:
        values.pop("rope_theta")
        overrides["rope_parameters"] = dict(overrides.pop("rope"))
    values.update(overrides)
    torch.manual_seed(0)
    folder = new_folder("tiny")
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@functools.cache
def oracle(folder: Path) -> Any:
    """transformers' model of the folder, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def checkpoint_of(folder: Path) -> Checkpoint:
    return resolve_checkpoint(str(folder))


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    """max_num_seqs 4, block size 4, 64 blocks, depth 2, float32; keyword arguments change it,
    kv_dtype the element type of keys and values, runner as in EngineArgs."""
    checkpoint = checkpoint_of(folder)
    model = read_model_config(checkpoint)
    args = EngineArgs(runner=changes.pop("runner", "generate"))
    pooling = decide_pooling(args, checkpoint, model)
    model = replace(model, has_lm_head=not pooling.tasks)
    known = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 0,
        "policy": "fcfs",
        "max_steps_in_flight": 2,
        "num_stages": 1,
        "chunks_prompts": model.keeps_kv,
    }
    if not model.keeps_kv:
        known["max_num_batched_tokens"] = changes.get("max_model_len", 128)
    scheduler = {name: changes.pop(name, default) for name, default in known.items()}
    caching = changes.pop("enable_prefix_caching", True) and model.keeps_kv
    # Of recurrent models every block's end is a checkpoint, so that they hit what others do.
    interval = changes.pop("checkpoint_interval", 4)
    cache = CacheConfig(
        block_size=changes.pop("block_size", 4),
        num_blocks=changes.pop("num_blocks", 64),
        dtype=changes.pop("kv_dtype", changes.get("dtype", "float32")),
        enable_prefix_caching=caching,
        checkpoint_interval=interval if model.is_recurrent and caching else 0,
        num_host_pages=changes.pop("num_host_pages", 0),
    )
    config = EngineConfig(
        model=model,
        pooling=pooling,
        generation=read_generation_defaults(checkpoint),
        cache=cache,
        scheduler=SchedulerConfig(**scheduler),
        dtype="float32",
        device="cpu",
        seed=0,
        max_model_len=128,
        attention_backend="torch",
        batch_invariant=False,
        num_threads=1,
        max_logprobs=20,
    )
    config = replace(config, **changes)
    return replace(config, model=config.model.for_length(config.max_model_len))


class QueuedCPU(CPUDevice):
    """The CPU, collected as late as a GPU: launches still run inline."""

    runs_inline = False


def make_device(kind: str) -> Device:
    """kind: a name, and perhaps "/" and a staging mode."""
    name, _, mode = kind.partition("/")
    if name == "cuda":
        return CUDADevice(0, mode or "auto")
    if name == "fake":
        return FakeDevice(mode or "auto")
    return {"cpu": CPUDevice, "queued": QueuedCPU}[name](1, mode or "auto")


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    request: Request | None = None
    logprobs: list[Any] = field(default_factory=list)
    pooled: np.ndarray | None = None


class TinyEngine:
    """Scheduler, worker and loop without text."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        choose: Callable[[Descriptor], Descriptor] | None = None,
        **changes: Any,
    ) -> None:
        self.config = make_config(folder, **changes)
        extra = {} if choose is None else {"choose": choose}
        self.device = make_device(device)
        self.worker = Worker(
            self.config,
            checkpoint_of(folder),
            device=self.device,
            move_costs=MoveCosts(),  # whatever fits the host pages is moved, on any machine
            **extra,
        )
        self.config = self.worker.config
        self.loop = EngineLoop(self.config, self.worker)
        self.outcomes: dict[str, Outcome] = {}
        self._next = 0

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | PoolingParams = GREEDY,
        *,
        seed: int = 7,
        **kw: Any,
    ) -> str:
        if isinstance(params, PoolingParams):
            params = self.config.pooling.complete(params)
        name = f"r{self._next}"
        self._next += 1
        request = Request(
            name,
            np.array(prompt, np.int32),
            params,
            eos_token_ids=self.config.generation.eos_token_ids,
            seed=seed,
            **kw,
        )
        self.loop.add(request)
        self.outcomes[name] = Outcome(request=request)
        return name

    def step(self) -> None:
        for update, rows in self.loop.step():
            outcome = self.outcomes[update.request.request_id]
            outcome.token_ids += update.new_token_ids
            if rows is not None:
                outcome.logprobs.append((rows, update.first_row, update.last_row))
            if update.finish_reason:
                assert outcome.finish_reason is None
                outcome.finish_reason = update.finish_reason
                outcome.error = update.request.error
                outcome.pooled = update.pooled

    def run(self, limit: int = 2000) -> dict[str, Outcome]:
        """Until all requests have ended; then everything must be free again."""
        for _ in range(limit):
            if not self.loop.has_work():
                self.loop.scheduler.check_integrity()
                return self.outcomes
            self.step()
        raise AssertionError("the engine does not come to an end")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
    ) -> list[list[int]]:
        names = [self.add(prompt, params) for prompt in prompts]
        outcomes = self.run()
        for name in names:
            if (error := outcomes[name].error) is not None:
                raise error  # it says more than that tokens are missing
        return [outcomes[name].token_ids for name in names]

    def pool(
        self, prompts: Sequence[Sequence[int]], params: PoolingParams | Sequence[PoolingParams]
    ) -> list[np.ndarray]:
        """Pooled results, all prompts in one batch."""
        each = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        names = [self.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        outcomes = self.run()
        results = []
        for name in names:
            if (error := outcomes[name].error) is not None:
                raise error
            pooled = outcomes[name].pooled
            assert pooled is not None
            results.append(pooled)
        return results


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


@torch.no_grad()
def oracle_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), V] float32."""
    return oracle(folder)(torch.tensor([list(ids)])).logits[0]


def oracle_greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers. Fails if a choice is too close for float32 to decide."""
    ids = list(prompt)
    for _ in range(num_tokens):
        top = oracle_logits(folder, ids)[-1].topk(2)
        assert top.values[0] - top.values[1] > 1e-4, "the fixture has a near tie"
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :]


def assert_greedy(
    folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], length: int
) -> None:
    """Every answer is transformers' greedy one, of `length` tokens: if its choice after each
    position is the answer's next token, its own answer is the same. Fails as oracle_greedy does."""
    assert len(answers) == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == length
        top = oracle_logits(folder, [*prompt, *answer[:-1]])[len(prompt) - 1 :].topk(2)
        choices = top.indices[:, 0].tolist()
        assert answer == choices
        assert (top.values[:, 0] - top.values[:, 1]).min() > 1e-4, "the fixture has a near tie"
