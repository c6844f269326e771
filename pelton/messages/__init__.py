"""What crosses the border between the API process and the engine process."""

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "An engine in a process of its own needs msgspec and pyzmq: "
        "python -m pip install 'pelton[server]'"
    ) from error
