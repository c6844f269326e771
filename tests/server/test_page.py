"""The page's files and what it asks once a second; a browser uses them in tests/server/web."""

from __future__ import annotations

import asyncio
import tomllib
from importlib.resources import files
from pathlib import Path

from support.scripted_engine import echo_script, engine_of, scripted_llm
from support.serving import run, served

ROOT = Path(__file__).resolve().parents[2]


def test_files_of_the_page() -> None:
    """They need no key, nothing outside the folder is shown, and a browser asks for each once."""

    async def main() -> None:
        async with served(scripted_llm(), keys=["secret"]) as server:
            page = await server.client.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            for name, kind in [("app.js", "text/javascript"), ("style.css", "text/css")]:
                file = await server.client.get(f"/web/{name}")
                assert file.headers["content-type"].startswith(kind)
                assert file.headers["x-content-type-options"] == "nosniff"
                known = {"if-none-match": file.headers["etag"]}
                again = await server.client.get(f"/web/{name}", headers=known)
                assert (again.status_code, again.content) == (304, b"")
            for path in ("/web/", "/web/__init__.py", "/web/%2e%2e/app.py", "/web/index.html"):
                assert (await server.client.get(path)).status_code == 404, path

    run(main)


def test_the_page_is_in_the_wheel() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["pelton.server.web"]
    for file in files("pelton.server.web").iterdir():
        assert any(Path(file.name).match(one) for one in [*patterns, "*.py", "__pycache__"]), file


def test_stats_follow_the_engine() -> None:
    async def main() -> None:
        llm = scripted_llm(echo_script, delay=0.002)
        engine = engine_of(llm)
        async with served(llm, keys=["secret"]) as server:

            async def stats() -> dict[str, float]:
                response = await server.client.get("/stats")
                assert response.status_code == 200
                found: dict[str, float] = response.json()
                return found

            before = await stats()
            assert (before["generation_tokens"], before["first_tokens"]) == (0, 0)
            headers = {"authorization": "Bearer secret"}
            body = {"prompt": "x y z", "max_tokens": 400}
            task = asyncio.create_task(server.post("/v1/completions", body, headers=headers))
            while (busy := await stats())["num_requests_running"] == 0:
                await asyncio.sleep(0.005)
            assert 0 < busy["kv_cache_usage"] <= 1
            usage = (await task).json()["usage"]
            after = await stats()
            assert after["generation_tokens"] == usage["completion_tokens"] == 400
            assert after["prompt_tokens"] == usage["prompt_tokens"]
            assert after["first_tokens"] == 1
            assert 0 < after["first_token_seconds"] < 30
            assert after["uptime_seconds"] > before["uptime_seconds"]
            engine.die()
            assert (await stats())["is_alive"] is False

    run(main)
