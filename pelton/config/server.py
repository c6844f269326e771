"""What a user may ask of the HTTP server, beside what `EngineArgs` asks of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.config.sizes import Bytes, read_sizes


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Arguments as users type them; names are vLLM's where it has them.

    host: address to listen at. Only this machine can connect unless it is "0.0.0.0" or "::".
    port: where to listen; 0 = any that is free.
    uds: path of a Unix socket to listen on, instead of host and port.
    root_path: prefix under which a proxy serves this server, such as "/llm"; the proxy may take it
        away or keep it.
    served_model_name: names that requests may call the model by, the first one in answers; the
        checkpoint's own name if left out. Several may stand behind one flag.
    api_key: a key that clients must send; may be repeated. Keys may also stand in the environment,
        PELTON_API_KEY, separated by commas, where no list of processes shows them. An empty key or
        variable is an error, and not an open server.
    api_key_file: a file with one key per line; a line that begins with # is a comment.
    ssl_certfile / ssl_keyfile: PEM files; with them the server speaks HTTPS.
    ssl_keyfile_password: of an encrypted ssl_keyfile.
    ssl_ca_certs: PEM file of authorities; with it, clients must show a certificate of theirs.
    allowed_origins: an origin as browsers send it, such as https://example.org, whose pages may
        call the server; may be repeated, * = all. Without it, none but the server's own page.
    chat_template_content_format: what the chat template expects as message content: "auto" |
        "string" | "parts".
    trust_request_chat_template: let requests bring a chat template of their own.
    max_body_bytes: a longer request body is refused.
    max_num_queued_reqs: requests that may wait for their turn; more are answered with 503. None:
        no limit.
    keep_alive_timeout: seconds after which an idle connection is closed.
    head_timeout: seconds in which a request's first line and headers must arrive, however they
        come.
    body_timeout: the same for a request's body.
    send_timeout: seconds after which a client that takes nothing of its answer is cut off.
    shutdown_timeout: seconds that running requests get after the first Ctrl-C or SIGTERM; None: as
        long as they take. A second Ctrl-C ends them at once.
    log_level: "debug" | "info" | "warning" | "error".
    log_requests: a line per request, with its numbers and without its texts.
    log_prompts: prompts in those lines, too, cut to 1000 characters.
    log_interval: seconds between lines with throughput, queue and cache use while there is work;
        0: none.
    metrics_prefix: what names at /metrics begin with; "vllm" fits dashboards made for vLLM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    served_model_name: list[str] | None = None
    api_key: list[str] | None = None
    api_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: list[str] | None = None
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False
    max_body_bytes: Bytes = 32 * 2**20
    max_num_queued_reqs: int | None = None
    keep_alive_timeout: int = 75
    head_timeout: float = 20.0
    body_timeout: float = 300.0
    send_timeout: float = 60.0
    shutdown_timeout: float | None = None
    log_level: str = "info"
    log_requests: bool = True
    log_prompts: bool = False
    log_interval: float = 10.0
    metrics_prefix: str = "pelton"

    def __post_init__(self) -> None:
        read_sizes(self)
