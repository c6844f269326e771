"""What of a machine is one engine's, where several equal ones stand on it. No torch."""

from __future__ import annotations

from dataclasses import replace

from pelton.config.engine import EngineArgs
from pelton.config.hardware import DeviceFacts
from pelton.errors import ConfigError


def share_of(facts: DeviceFacts, args: EngineArgs) -> DeviceFacts:
    """The facts for one of data_parallel_size engines: cores and host memory are dealt out in equal
    parts, and GPUs in whole ones, so that each engine has tensor_parallel_size times
    pipeline_parallel_size of them.

    Raises ConfigError where there are not so many GPUs.
    """
    num_replicas = args.data_parallel_size
    cores = max(facts.num_cores // num_replicas, 1)
    if facts.kind == "cuda":
        needed = num_replicas * args.num_ranks
        if needed > facts.num_devices:
            each = "" if args.num_ranks == 1 else f", {args.num_ranks} for each engine,"
            raise ConfigError(
                f"data_parallel_size={num_replicas} needs {needed} GPUs{each} and there are "
                f"{facts.num_devices}; lower it."
            )
        host = facts.host_free_bytes
        return replace(
            facts,
            num_cores=cores,
            num_devices=args.num_ranks,
            host_free_bytes=None if host is None else host // num_replicas,
        )
    return replace(
        facts,
        name=f"one of {num_replicas} shares of {facts.name}",
        total_bytes=facts.total_bytes // num_replicas,
        free_bytes=facts.free_bytes // num_replicas,
        num_cores=cores,
    )
