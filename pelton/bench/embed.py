"""`pelton bench embed`: texts of mixed length become vectors; texts per second."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pelton.bench import machine, report
from pelton.bench.options import EmbedOptions
from pelton.config.engine import EngineArgs
from pelton.engine.llm import LLM
from pelton.errors import ConfigError
from pelton.tokens.tokenizer import Tokenizer

Embed = Callable[[list[str]], np.ndarray]
_BASELINE = "sentence_transformers"


def run(args: EngineArgs, options: EmbedOptions) -> None:
    """Measures, prints, writes the result file."""
    report.check_writable(options.json)
    sides: dict[str, Embed] = {}
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    if not llm.config.pools:
        raise ConfigError("bench embed needs an engine that pools: give it --runner pooling.")
    tokenizer = llm.get_tokenizer()
    most = llm.config.max_model_len
    if options.input_len > most:
        raise ConfigError(f"input_len must be at most max_model_len={most}.")

    def engine(texts: list[str]) -> np.ndarray:
        outputs = llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)
        return np.array([output.outputs.embedding for output in outputs if output.outputs])

    sides["engine"] = engine
    if options.baseline:
        sides["baseline"] = _sentence_transformers(args, llm.config.dtype)
    texts = mixed_texts(tokenizer, options.num_prompts, options.input_len, llm.config.seed)
    num_tokens = sum(min(len(tokenizer.encode(text)), most) for text in texts)
    result = _context(args, options, llm)
    result["num_tokens"] = num_tokens
    seconds, vectors = _alternate(sides, texts, options)
    for name, values in seconds.items():
        speed = report.Summary.of([len(texts) / value for value in values])
        result[name] = {"samples_s": values, "texts_per_s": dataclasses.asdict(speed)}
        tokens = num_tokens * speed.median / len(texts)
        print(f"{name:9} texts/s   {speed.line()}   {tokens:.0f} tokens/s")
    if options.baseline:
        own, theirs = ([1 / value for value in values] for values in seconds.values())
        sides_text = "engine / sentence-transformers"
        result["ratio"] = report.print_ratios("embed", own, theirs, sides_text)
        result["least_cosine"] = float(_cosines(*vectors.values()).min())
        print(f"least cosine between both sides' vectors: {result['least_cosine']:.6f}")
    report.write_json(options.json, result)


def mixed_texts(tokenizer: Tokenizer, count: int, longest: int, seed: int) -> list[str]:
    """Of lengths spread over 1 to about `longest` tokens, short ones more often; pieces of the
    vocabulary that are words."""
    rng = np.random.default_rng(seed)
    words: list[str] = []
    while len(words) < 500:
        text = tokenizer.decode([int(rng.integers(tokenizer.vocab_size))]).strip()
        if text.isascii() and text.isalpha():
            words.append(text)
    lengths = np.exp(rng.uniform(0, np.log(longest), count)).astype(int).clip(1, longest)
    return [" ".join(words[i] for i in rng.integers(len(words), size=n)) for n in lengths]


def _sentence_transformers(args: EngineArgs, dtype: str) -> Embed:
    """The library of that name, with batches of its default size, sorted by length as it does."""
    if importlib.util.find_spec(_BASELINE) is None:
        raise ConfigError("--baseline is sentence-transformers here: pip install it first.")
    kind = importlib.import_module(_BASELINE).SentenceTransformer
    device = args.device if args.device.startswith("cuda") else "cpu"
    model = kind(args.model, device=device, model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: list[str]) -> np.ndarray:
        return np.asarray(model.encode(texts, normalize_embeddings=True), np.float32)

    return embed


def _alternate(
    sides: dict[str, Embed], texts: list[str], options: EmbedOptions
) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Seconds of each side's runs, taken in turns, and its vectors."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    vectors: dict[str, np.ndarray] = {}
    for index in range(options.num_iters_warmup + options.num_iters):
        for name, embed in sides.items():
            started = time.perf_counter()
            vectors[name] = embed(texts)
            if index >= options.num_iters_warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds, vectors


def _cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    norms: Sequence[np.ndarray] = [np.linalg.norm(side, axis=1) for side in (left, right)]
    cosines: np.ndarray = (left * right).sum(1) / (norms[0] * norms[1])
    return cosines


def _context(args: EngineArgs, options: EmbedOptions, llm: LLM) -> dict[str, Any]:
    facts = machine.facts(machine.torch_device(llm.config.device))
    result = {
        "command": report.command(),
        "machine": dataclasses.asdict(facts),
        "options": dataclasses.asdict(options),
        **report.engine_context(args, llm.config),
    }
    print(
        f"machine   {facts.cpu}, {facts.cores} cores, {facts.gpu or 'no GPU used'}\n"
        f"software  pelton {facts.pelton} ({facts.commit or 'no commit'}), torch {facts.torch}\n"
        f"command   {result['command']}\n"
        f"engine    {llm.config.model.architecture}, {llm.config.dtype} on {llm.config.device}, "
        f"{llm.config.num_threads} threads; {os.cpu_count()} processors"
    )
    return result
