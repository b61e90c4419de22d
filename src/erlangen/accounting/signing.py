"""Ed25519 signatures over a certificate: who vouches for it, and whether it changed since.

Needs the `cryptography` package (`pip install 'erlangen[sign]'`), imported only when something is signed or checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from erlangen.extras import MissingExtra, require

ALGORITHM = "ed25519"


class SigningError(RuntimeError):
    """A key or a signature cannot be used; the message says why."""


def canonical(document: dict[str, Any]) -> bytes:
    """The bytes that are signed: the document without its signature, keys sorted, no spaces."""
    content = {key: value for key, value in document.items() if key != "signature"}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def generate_key(path: str | os.PathLike[str]) -> str:
    """Write a new private key (PEM, readable by its owner only); returns the public key in hexadecimal."""
    module = _module()
    from cryptography.hazmat.primitives import serialization as ser

    key = module.Ed25519PrivateKey.generate()
    pem = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(pem)
    return _public_hex(key.public_key())


def sign(document: dict[str, Any], key_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document with a signature by the private key at `key_path` (PEM)."""
    module = _module()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(Path(key_path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise SigningError(f"cannot use {key_path} as a private key: {error}") from None
    if not isinstance(key, module.Ed25519PrivateKey):
        raise SigningError(f"{key_path} is not an Ed25519 private key")
    signature = {
        "algorithm": ALGORITHM,
        "public_key": _public_hex(key.public_key()),
        "value": key.sign(canonical(document)).hex(),
    }
    return {**document, "signature": signature}


def check(document: dict[str, Any], public_key: str | None = None) -> str | None:
    """`None` if the document's signature is good (and by `public_key`, where given); else what is wrong."""
    signature = document.get("signature")
    if not isinstance(signature, dict) or set(signature) != {"algorithm", "public_key", "value"}:
        return "the signature is not {algorithm, public_key, value}"
    if signature["algorithm"] != ALGORITHM:
        return f"the signature algorithm is not {ALGORITHM}"
    if public_key is not None and signature["public_key"] != public_key.strip().lower():
        return "the certificate is signed by another key than the expected one"
    try:
        module = _module()
    except MissingExtra as error:
        return str(error)
    from cryptography.exceptions import InvalidSignature

    try:
        key = module.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        key.verify(bytes.fromhex(signature["value"]), canonical(document))
    except (InvalidSignature, ValueError, TypeError):
        return "the signature does not match: the certificate was changed after it was signed"
    return None


def _public_hex(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization as ser

    return key.public_bytes(ser.Encoding.Raw, ser.PublicFormat.Raw).hex()


def _module() -> Any:
    require("a signature", "sign", "cryptography")
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519
