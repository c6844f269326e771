"""A program with an engine, which kills itself in the phase that it is told: `FOLDER PHASE FILE`.

Prints the pid of the engine's process and the folder of its sockets before that. While generating
the engine has started a process, whose pid stands in FILE.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.engine import client
from pelton.engine.async_llm import AsyncLLM
from pelton.sampling.table import register


def main(folder: str, phase: str) -> None:
    spawn = client.subprocess.Popen
    wanted = phase

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def told(command: list[str], **options: Any) -> Any:
        process = spawn(command, **options)
        print(process.pid, command[-1], flush=True)
        if wanted == "spawned":
            die()
        return process

    client.subprocess.Popen = told  # type: ignore[misc, assignment]

    def on_phase(name: str, seconds: float) -> None:
        if name == wanted:
            die()

    async def serve() -> None:
        args = EngineArgs(model=folder, device="cpu", max_model_len=96, num_threads=1)
        llm = await AsyncLLM.start(args, on_phase=on_phase)
        how = {"how": f"child:{sys.argv[3]}"}
        params = SamplingParams(
            max_tokens=None, ignore_eos=True, logits_processors={"sabotage": how}
        )
        assert "torch" not in sys.modules
        if wanted == "idle":
            die()
        async for _ in llm.generate([5, 6, 7], params, request_id="r"):
            assert "torch" not in sys.modules
            die()

    asyncio.run(serve())


if __name__ == "__main__":
    register("sabotage", "support.sabotage:sabotage")
    main(sys.argv[1], sys.argv[2])
