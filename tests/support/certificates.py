"""Certificates for TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "localhost") -> tuple[str, str]:
    """Files of a certificate that signs itself, and of its key."""
    folder.mkdir(exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name}"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)


def make_encrypted(key: str, target: str, password: str) -> None:
    command = ["openssl", "pkey", "-aes256", "-in", key, "-out", target]
    subprocess.run([*command, "-passout", f"pass:{password}"], check=True, capture_output=True)
