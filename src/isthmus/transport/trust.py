"""Whom a worker lets in: those on a list of keys, those who know the run's secret, or whoever the rendezvous names."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.core.types import UserError
from isthmus.link.identity import Identity, check_fingerprint, is_signed_by

SECRET = "ISTHMUS_RUN_SECRET"
_MIN_SECRET_LETTERS = 16
_PURPOSE = b"isthmus: told by "
_LOGGER = logging.getLogger(__name__)


class Trust:
    """The key of this worker, and those with which others may take part.

    With a list of keys, whoever holds one of them; with a secret, whoever knows it: all derive one key from it. With
    neither, whoever can write at the rendezvous, which is for workers of one machine, and for networks of friends.

    Args:
        identity: a file that `isthmus identity` wrote; None: a key derived from the secret, or a new one.
        trusted: a file with a fingerprint a line, behind which anything may stand; it is read again when it changes.

    Raises:
        UserError: a file cannot be read, or only one of them is named.
    """

    def __init__(self, identity: str | None = None, trusted: str | None = None) -> None:
        secret = os.environ.get(SECRET, "")
        if (identity is None) != (trusted is None):
            missing = "identity" if identity is None else "trusted"
            raise UserError(f"outer.transport.{missing} is missing: name both a key and the file of all workers' keys")
        if secret and len(secret) < _MIN_SECRET_LETTERS:
            raise UserError(f"{SECRET} is shorter than {_MIN_SECRET_LETTERS} letters: take a random one")
        self._list = None if trusted is None else _List(Path(trusted))
        self._of_secret = bool(secret) and identity is None
        if identity is not None:
            self.identity = Identity.load(Path(identity))
        else:
            self.identity = Identity.from_secret(secret) if secret else Identity.generate()

    @property
    def is_open(self) -> bool:
        """Whether whoever can write at the rendezvous is let in."""
        return self._list is None and not self._of_secret

    def among(self, fingerprints: Iterable[str]) -> list[str]:
        """Return those of the fingerprints that may take part."""
        known = self.everybody()
        return [each for each in fingerprints if self.is_open or each in known]

    def everybody(self) -> set[str]:
        """Return the fingerprints that are trusted whether or not the rendezvous names them."""
        return self._list.read() if self._list is not None else {self.identity.fingerprint}

    def sign(self, name: str, told: Any) -> dict[str, str]:
        """Return what a worker tells, plain JSON values, so that the others can see that it is the worker's word."""
        text = json.dumps(told)
        signature = base64.b64encode(self.identity.sign(_message(name, text))).decode()
        return {"told": text, "key": self.identity.fingerprint, "signature": signature}

    def read(self, name: str, signed: Any) -> Any:
        """Return what a worker of this name told.

        Raises:
            ValueError: nobody who may take part told that; the message says why.
        """
        match signed:
            case {"told": str(text), "key": str(key), "signature": str(signature)}:
                if not self.among([key]):
                    raise ValueError(f"its key {key} is not trusted")
                if not is_signed_by(key, base64.b64decode(signature), _message(name, text)):
                    raise ValueError("its signature is wrong")
                return json.loads(text)
        raise ValueError("it told something unreadable: install the same version of isthmus everywhere")


class _List:
    """A file of fingerprints, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_at = path, (0, 0)
        self._fingerprints: set[str] = set()
        try:
            self._refresh()
        except OSError as error:
            raise UserError(f"outer.transport.trusted: {path} cannot be read ({error.strerror})") from error
        except UserError as error:
            raise UserError(f"outer.transport.trusted, file {path}: {error}") from error

    def read(self) -> set[str]:
        """Return the fingerprints of now; while the file cannot be read, those of before."""
        try:
            self._refresh()
        except (OSError, UserError) as error:
            _LOGGER.warning("%s stays as it was read before: %s", self._path, error)
        return self._fingerprints

    def _refresh(self) -> None:
        status = self._path.stat()
        if (status.st_mtime_ns, status.st_size) != self._read_at:
            lines = [line.split("#")[0].split() for line in self._path.read_text().splitlines()]
            fingerprints = {words[0] for words in lines if words}
            for fingerprint in fingerprints:
                check_fingerprint(fingerprint)
            self._fingerprints, self._read_at = fingerprints, (status.st_mtime_ns, status.st_size)


def _message(name: str, text: str) -> bytes:
    return _PURPOSE + name.encode() + b"\n" + text.encode()
