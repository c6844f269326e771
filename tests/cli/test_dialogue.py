"""`pelton chat` and `pelton complete` as processes: in a terminal, against a server and alone."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import ServeProcess, chat_model, serving

from pelton.cli import chat as cli_chat
from pelton.cli import generate as cli_generate
from pelton.cli.api import ServerApi
from pelton.cli.chat import Chat
from pelton.cli.complete import Completing
from pelton.cli.dialogue import _assignments
from pelton.errors import EngineError, RequestError

KEY = "sk-chat"
COMMAND = [sys.executable, "-m", "pelton.cli.main"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    model = chat_model(2048)
    with serving("--served-model-name", "tiny", model=model, PELTON_API_KEY=KEY) as running:
        yield running


class Terminal:
    """A command with a terminal of its own. seen: all that it has shown."""

    def __init__(self, words: list[str], home: Path) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "HOME": str(home), "TERM": "dumb", "PELTON_API_KEY": KEY}
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            # So that Ctrl-C on it is this process's.
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.seen = ""
        self._place = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, words: str, seconds: float = 30) -> str:
        """What was shown since the last wait, up to `words`."""
        end = time.monotonic() + seconds
        while (found := self.seen.find(words, self._place)) < 0:
            assert time.monotonic() < end, f"no {words!r} in {self.seen[self._place :]!r}"
            self._read()
        text = self.seen[self._place : found]
        self._place = found + len(words)
        return text

    def wait_for_an_answer(self) -> None:
        """Until something stands behind what was waited for last."""
        end = time.monotonic() + 30
        while len(self.seen) == self._place:
            assert time.monotonic() < end
            self._read()

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            try:
                self.seen += os.read(self._ours, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"it ended: {self.seen!r}") from None

    def wait(self) -> int:
        """Its exit code; what it shows is read meanwhile."""
        end = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on: {self.seen[self._place :]!r}"
            with contextlib.suppress(OSError):
                if select.select([self._ours], [], [], 0.1)[0]:
                    os.read(self._ours, 65536)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # As in a terminal, also where the tests were started with it ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def terminal(server: ServeProcess, tmp_path: Path) -> Iterator[Terminal]:
    words = ["chat", "--url", server.url, "--max-tokens", "6", "--ignore-eos"]
    opened = Terminal([*words, "--temperature", "0"], tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def test_a_conversation(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("Talking to tiny.")
    terminal.wait_for(">>> ")
    terminal.type("hello\n")
    terminal.wait_for("+ 6 tokens, first after")
    terminal.wait_for("tokens/s, length]")
    terminal.type("/retry\n")
    terminal.wait_for("+ 6 tokens")
    terminal.type("/set max_tokens=3 top_k=5\n")
    terminal.wait_for('"max_tokens": 3')
    terminal.type("\x1b[A\x1b[A\x1b[A\n")  # up to "hello"
    terminal.wait_for("+ 3 tokens")
    terminal.type("/set tepmerature=1\n")
    terminal.wait_for("tepmerature is not a field")
    terminal.type("/set tepmerature=\n")
    terminal.type('"""one\ntwo"""\n')
    terminal.wait_for("+ 3 tokens")
    terminal.type("/system Be brief.\n/nonsense\n")
    terminal.wait_for("[/nonsense is no command")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.wait_for("[written to")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.wait_for("talk.json cannot be written: File exists.")
    saved = json.loads((tmp_path / "talk.json").read_text())
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3]
    said = [message["content"] for message in saved["messages"] if message["role"] == "user"]
    assert said == ["hello", "hello", "one\ntwo"]
    assert saved["model"] == "tiny"
    terminal.type("/clear\n/help\n")
    terminal.wait_for("/retry  another answer")
    terminal.type("/quit\n")
    assert terminal.wait() == 0
    history = tmp_path / ".pelton_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_control_c(terminal: Terminal) -> None:
    terminal.wait_for(">>> ")
    terminal.type("/set max_tokens=1900\n")
    terminal.wait_for(">>> ")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\n")
    terminal.wait_for_an_answer()
    terminal.type("\x03")
    terminal.wait_for("[stopped; Ctrl-C once more ends this]", 5)
    terminal.wait_for(">>> ")
    # Something was said since: the next Ctrl-C is a first one.
    terminal.type("/set max_tokens=2\n")
    terminal.wait_for(">>> ")
    terminal.type("\x03")
    terminal.wait_for("once more")
    terminal.wait_for(">>> ")
    terminal.type("\x03")
    assert terminal.wait() == 130


def test_an_engine_of_its_own_in_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C stops the answer and not the engine; Ctrl-D is the end."""
    words = ["chat", str(chat_model(2048)), "--num-threads", "1", "--ignore-eos"]
    terminal = Terminal([*words, "--temperature", "0", "--max-tokens", "1900"], tmp_path)
    try:
        terminal.wait_for(">>> ", 120)
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        terminal.wait_for_an_answer()
        terminal.type("\x03")
        terminal.wait_for("[stopped; Ctrl-C once more ends this]")
        terminal.wait_for(">>> ")
        terminal.type("/set max_tokens=4\n")
        terminal.wait_for(">>> ")
        terminal.type("one\\\n")
        terminal.wait_for("... ")
        terminal.type("two\n")
        terminal.wait_for(" + 4 tokens, first after")
        terminal.wait_for(">>> ")
        terminal.type(f"/save {tmp_path}/talk.json\n")
        terminal.wait_for("[written to")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["content"] for m in said if m["role"] == "user"] == ["hello", "one\ntwo"]
    assert said[1]["content"]


def run(*words: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_one_answer_of_a_server(server: ServeProcess) -> None:
    words = ("complete", "--url", f"{server.url}/v1/", "--max-tokens", "5", "--temperature", "0")
    by_flag = run(*words, "-q", "The sea", "--api-key", KEY, "--ignore-eos", "--stats")
    assert by_flag.returncode == 0, by_flag.stderr
    assert "[7 + 5 tokens" in by_flag.stderr
    by_input = run(*words, "-q", "-", "--ignore-eos", text="The sea", PELTON_API_KEY=KEY)
    assert by_input.stdout == by_flag.stdout != ""
    assert by_input.stderr == ""
    wrong = run(*words, "-q", "x", "--api-key", "other")
    assert wrong.returncode == 2
    assert "A valid API key is needed" in wrong.stderr
    nobody = run("chat", "-q", "x", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "http://127.0.0.1:9 does not answer: Connection refused." in nobody.stderr


def test_a_server_of_another_kind() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request).start()
        url = f"http://127.0.0.1:{other.server_port}"
        with pytest.raises(EngineError, match=f"^{url}/v1/models answered with status 501, and"):
            ServerApi(f"{url}/v1/", None, None)


def test_lines_from_a_pipe(server: ServeProcess) -> None:
    """Answers alone on standard output, and no prompt anywhere."""
    words = ("complete", "--url", server.url, "--api-key", KEY, "--max-tokens", "5")
    words = (*words, "--temperature", "0", "--ignore-eos")
    alone = [run(*words, "-q", text).stdout for text in ("The sea", "a\nb")]
    piped = run(*words, "--no-stats", text='The sea\n"""a\nb')
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "".join(alone), "")
    wrong = run(*words, text="/set n=2\nThe sea\n")
    assert (wrong.returncode, wrong.stdout) == (2, alone[0])
    assert "[n is set by this command itself" in wrong.stderr


def test_what_is_no_text(server: ServeProcess) -> None:
    found = subprocess.run(
        [*COMMAND, "chat", "--url", server.url, "--api-key", KEY],
        input=b"\xff\xfe\n",
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert found.returncode == 2
    assert b"pelton: standard input must be text: invalid start byte.\n" in found.stderr


def test_bytes_that_are_no_text_cost_their_line_alone(server: ServeProcess) -> None:
    """Where Python lets them through: they are told as what they are, and not as JSON."""
    words = ("complete", "--url", server.url, "--api-key", KEY, "--max-tokens", "2")
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:surrogateescape"}
    found = subprocess.run(
        [*COMMAND, *words, "--ignore-eos"],
        input=b"a\xff\nThe sea\n",
        capture_output=True,
        check=False,
        env=environment,
    )
    assert found.returncode == 2
    assert b"[standard input must be text: it holds bytes that are no UTF-8.]" in found.stderr
    assert found.stdout.count(b"\n") == 1
    for more in (["-q", b"a\xff"], ["-q", "-"]):
        once = subprocess.run(
            [*COMMAND, *words, *more],
            input=b"\xff",
            capture_output=True,
            check=False,
            env=environment,
        )
        assert once.returncode == 2
        assert b"must be text: it holds bytes that are no UTF-8." in once.stderr


def test_a_setting_that_the_server_refuses_can_be_taken_back(server: ServeProcess) -> None:
    words = ("complete", "--url", server.url, "--api-key", KEY, "--max-tokens", "2")
    found = run(
        *words,
        "--ignore-eos",
        "--temperature",
        "0",
        text="/set foo=1\nThe sea\n/set foo=\nThe sea\n",
    )
    assert "[foo is not a field that is known here. /set foo= takes it back.]" in found.stderr
    assert found.stdout.count("\n") == 1


def test_one_answer_of_an_engine_of_its_own(server: ServeProcess) -> None:
    """The same as the server's."""
    words = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "-q", "hello")
    served = run("chat", "--url", server.url, *words, PELTON_API_KEY=KEY)
    alone = run("chat", str(chat_model(2048)), "--num-threads", "1", *words)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == served.stdout != ""
    assert alone.stderr.startswith(f"loading {chat_model(2048)}\n")
    wrong = run("chat", "/no/such/model", "-q", "x")
    assert wrong.returncode == 2
    assert "/no/such/model" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--url http://x MODEL", "MODEL and --url exclude each other"),
        ("--url http://x text", "a text for it goes behind -q"),
        ("--url http://x --max-model-len 5", "--max-model-len and --url exclude each other"),
        ("--api-key k", "--api-key is for a server; add --url"),
        ("--url ftp://x -q a", "starts with http:// or https://"),
        ("--url notaurl -q a", "starts with http:// or https://"),
        ("--url http:// -q a", "starts with http:// or https://"),
        ("--url http://[x -q a", "has no valid host"),
        ("--client-cert c.pem", "--client-cert is for a server; add --url"),
        ("--url https://x --client-key k.pem", "--client-key needs --client-cert"),
    ],
)
def test_flags_that_do_not_go_together(words: str, sentence: str) -> None:
    found = run("chat", *words.split())
    assert found.returncode == 2
    assert sentence in found.stderr


class FakeApi:
    """Answers "yes", and keeps what it was asked."""

    model = "fake"

    def __init__(self, fields: frozenset[str] | None = None) -> None:
        self.fields = fields
        self.bodies: list[dict[str, Any]] = []

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
        yield {"choices": [{**delta, "text": "yes"}]}

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("/set temperature=abc", "temperature must be a finite number, got 'abc'."),
        ("/set temperature=-1", r"temperature must be in \[0, 100\]"),
        ("/set top_k=2.5", "top_k must be an integer"),
        ("/set top_k=5 top_p=7", "top_p must be in"),
        ("/set max_tokens=0", "max_tokens must be at least 1"),
        ("/set stop=1", "stop must be a list"),
        ("/set ignore_eos=yes", "ignore_eos must be True or False"),
        ("/set tepmerature=1", "tepmerature is not a field .* Did you mean 'temperature'?"),
        ("/set messages=[]", "messages is set by this command itself"),
        ("/set n=2", "n is set by this command itself"),
        ("/set temperature", "/set takes name=value, got 'temperature'"),
        ("/set 1=2", "/set takes name=value"),
        ("/clear all", "/clear takes no words, got 'all'"),
        ("/retry again", "/retry takes no words"),
        ("/help me", "/help takes no words"),
        ("/quit now", "/quit takes no words"),
        ("/retry", "nothing to try again"),
        ("/save", "/save needs a file"),
        ("/save /no/such/folder/x", "/no/such/folder/x cannot be written: No such file"),
    ],
)
def test_wrong_commands_are_told_and_change_nothing(command: str, sentence: str) -> None:
    chat = Chat(FakeApi(), {"seed": 1}, "Be brief.", shows_stats=False)
    with pytest.raises(RequestError, match=sentence):
        chat._command(command)
    assert chat.sampling == {"seed": 1}
    assert [message["role"] for message in chat.messages] == ["system"]


def test_where_the_fields_are_known_no_other_is_set() -> None:
    chat = Chat(FakeApi(frozenset({"priority"})), {}, None, shows_stats=False)
    chat._command("/set priority=1")
    with pytest.raises(RequestError, match="foo is not a field that is known here"):
        chat._command("/set foo=1")
    assert chat.sampling == {"priority": 1}


def test_settings_reach_the_next_request() -> None:
    api = FakeApi()
    chat = Chat(api, {}, None, shows_stats=False)
    chat._command('/set temperature=3 stop="a b" min_tokens=20 repetition_detection={"a": 1}')
    chat.ask("hi")
    chat._command("/set stop= temperature=")
    chat.ask("hi")
    first, second = ({k: v for k, v in b.items() if k != "messages"} for b in api.bodies)
    kept = {"min_tokens": 20, "repetition_detection": {"a": 1}}
    assert first == {"temperature": 3, "stop": "a b", **kept}
    assert second == kept
    assert Completing(api, {}, shows_stats=False)._command("/quit") is False


def test_a_model_without_a_template_is_told_before_it_is_loaded() -> None:
    folder = chat_model(2048).parent / "without-template"
    if not folder.exists():
        shutil.copytree(chat_model(2048), folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "model.safetensors").write_bytes(b"")  # nobody is to look into it
    for words in (["chat", str(folder), "-q", "x"], ["generate", str(folder), "--chat"]):
        more = ["--prompt", "x"] if words[0] == "generate" else []
        with pytest.raises(RequestError, match="no default chat template"):
            COMMANDS[words[0]].run(COMMANDS[words[0]].parse([*words[1:], *more]))


COMMANDS = {"chat": cli_chat, "generate": cli_generate}


def test_values_of_set_may_have_blanks() -> None:
    assert _assignments("stop=a b temperature=1 x=") == ["stop=a b", "temperature=1", "x="]
