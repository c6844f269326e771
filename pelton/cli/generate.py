"""`pelton generate`: prompts in, text (or one JSON object per prompt) out."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pelton.cli.flags import Parser, add_fields, field_names, given
from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.errors import RequestError
from pelton.sampling.table import processor_target

ENGINE_FIELDS = [name for name in field_names(EngineArgs) if name != "model"]
# Text is what the command is for, the engine makes bad_words_token_ids from bad_words, and the
# others no version of this engine does.
_NO_FLAGS = ("detokenize", "bad_words_token_ids", "best_of", "structured_outputs")
SAMPLING_FIELDS = [name for name in field_names(SamplingParams) if name not in _NO_FLAGS]
DEFAULT_MAX_TOKENS = 128

# The engine has a `seed` of its own; on this command the word means the request's.
_ENGINE_FLAGS = [name for name in ENGINE_FIELDS if name != "seed"]


def make_parser() -> Parser:
    """The command's flags."""
    parser = Parser(prog="pelton generate", description="Continues prompts with a model.")
    add_model(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue; may be repeated; - reads one prompt from standard input",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message in the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per prompt on standard output"
    )
    add_fields(
        parser,
        "sampling (what is not given, the checkpoint's generation_config decides)",
        SamplingParams,
        SAMPLING_FIELDS,
        defaults={"max_tokens": DEFAULT_MAX_TOKENS},
    )
    add_fields(parser, "engine", EngineArgs, _ENGINE_FLAGS)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    parser = make_parser()
    options = parser.parse(argv)
    if not options.json:
        for name in given(options, ("logprobs", "prompt_logprobs")):
            parser.error(f"--{name.replace('_', '-')} is printed with --json alone; add --json")
    return options


def add_model(parser: Parser) -> None:
    """The arguments that every command with an engine has."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="folder, GGUF file or hub id; the embedded model if left out",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def check_can_chat(args: EngineArgs) -> None:
    """As in pelton/engine/prompts.py, which `--help` must not wait for."""
    importlib.import_module("pelton.engine.prompts").check_can_chat(args)


def run(options: argparse.Namespace) -> int:
    """Generates and prints; 1 or 2 if a request failed (ours or the user's fault)."""
    prompts = [_read_prompt(text) for text in options.prompt]
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **given(options, SAMPLING_FIELDS)}
    engine = given(options, ["model", *_ENGINE_FLAGS])
    # What is wrong is told before seconds go into loading.
    for name in SamplingParams(**sampling).processors:
        processor_target(name)
    if options.chat:
        check_can_chat(EngineArgs(**engine))

    begin = time.perf_counter()
    # By name, because an import would make torch a part of this module.
    llm = importlib.import_module("pelton.engine.llm").LLM(**engine)
    loaded = time.perf_counter()
    params = SamplingParams(**{**llm.config.generation.sampling, **sampling})
    show_bar = len(prompts) > 1 and sys.stderr.isatty()
    if options.chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=show_bar)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=show_bar)
    end = time.perf_counter()

    for number, output in enumerate(outputs, start=1):
        if options.json:
            print(json.dumps(output_json(output), ensure_ascii=False, allow_nan=False))
        else:
            _print_answers(output, str(number) if len(outputs) > 1 else "")
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    seconds = end - loaded
    sys.stdout.flush()
    print(
        f"{num_tokens} tokens after {num_prompt_tokens} of prompt in {seconds:.2f} s: "
        f"{num_tokens / seconds:.1f} tokens/s (engine ready in {loaded - begin:.2f} s)",
        file=sys.stderr,
    )
    return _report_errors(outputs)


def _print_answers(output: Any, prompt: str) -> None:
    """Each answer that did not fail, behind "[prompt.answer]" as far as there are several."""
    for completion in output.outputs:
        answer = str(completion.index + 1) if len(output.outputs) > 1 else ""
        place = ".".join(filter(None, (prompt, answer)))
        if completion.finish_reason != "error":
            print((f"[{place}] " if place else "") + completion.text)


def _report_errors(outputs: Sequence[Any]) -> int:
    code = 0
    for number, output in enumerate(outputs, start=1):
        if output.error:
            print(f"pelton generate: prompt {number}: {output.error}", file=sys.stderr)
            code = max(code, 2 if isinstance(output.error, RequestError) else 1)
    return code


def _read_prompt(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt from standard input must be text in {error.encoding}, but {error.reason} at "
            f"byte {error.start}.",
            field="prompt",
        ) from None


def output_json(output: Any) -> dict[str, Any]:
    """A RequestOutput as JSON-ready data, with vLLM's names. Numbers that JSON lacks (-inf as a
    masked token's log-probability) become null."""
    completions = [
        {
            "index": completion.index,
            "text": completion.text,
            "token_ids": _plain(completion.token_ids),
            "cumulative_logprob": _plain(completion.cumulative_logprob),
            "logprobs": _plain(completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": _plain(output.prompt_token_ids),
        "prompt_logprobs": _plain(output.prompt_logprobs),
        "outputs": completions,
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "error": str(output.error) if output.error else None,
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist())
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    return {name: _plain(getattr(value, name)) for name in field_names(type(value))}
