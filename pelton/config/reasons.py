"""Faults of the system, in words for people."""

from __future__ import annotations

import os


def reason_of(error: BaseException) -> str:
    """Why a file or a connection could not be used: without numbers, brackets and a full stop."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in {error.encoding}"
    if not isinstance(error, OSError):
        return str(error).rstrip(".")
    # ssl's own, which this module does not import: most who ask have nothing to do with it.
    if verify := getattr(error, "verify_message", ""):
        return f"its certificate cannot be trusted: {verify} (SSL_CERT_FILE names one to trust)"
    if library := getattr(error, "reason", None):
        return f"TLS failed: {str(library).replace('_', ' ').lower()}"
    if error.errno is None:
        return "nobody takes the connection" if "[Errno" in str(error) else str(error).rstrip(".")
    # Where names are looked up, numbers are another system's, and below 0.
    return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
