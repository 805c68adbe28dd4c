"""API keys: where they come from, and whose they are.

Keys are kept as hashes and compared in constant time. Each belongs to a tenant, for fair shares and so that nobody
finds out by the prefix cache what another has asked: a name from the key file, or one that is the key's alone.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from noria.config import ServerOptions
from noria.errors import OptionError

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[!-~]{1,512}")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. `tenant` is None where there are no keys: then everybody is the same."""

    tenant: str | None = None
    is_admin: bool = True


class Keys:
    """The keys that are valid now. Raises `OptionError` for what cannot be used."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._callers = _read(options)

    @property
    def are_needed(self) -> bool:
        return bool(self._callers)

    def reload(self) -> None:
        """Reads the key file again. If it cannot be used the keys stay as they are, and the log says why."""
        if self._options.api_key_file is None:
            return
        try:
            self._callers = _read(self._options)
        except OptionError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read %s again: %d API keys are valid", self._options.api_key_file, len(self._callers))

    def find(self, key: str) -> Caller | None:
        """Whose key it is; None if it is nobody's. Takes equally long whichever it is, and wherever it differs."""
        if not self._callers:
            return Caller()
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def _tenant_of(key: str) -> str:
    """The tenant of a key without a name: the same wherever it stands, also when the file is read again.

    No name from a file has a "#": such a key never shares a tenant by accident.
    """
    return f"key#{_digest(key).hex()[:16]}"


def _read(options: ServerOptions) -> list[tuple[bytes, Caller]]:
    admin_key = options.admin_api_key
    callers: dict[bytes, Caller] = {}
    for key, tenant, where in _given(options):
        if not _KEY.fullmatch(key):
            raise OptionError(f"{where}: a key is 1 to 512 printable ASCII characters without spaces")
        if tenant is not None and not _TENANT.fullmatch(tenant):
            raise OptionError(f"{where}: a tenant's name is up to 64 of A-Z a-z 0-9 . _ @ -")
        if _digest(key) in callers:
            raise OptionError(f"{where}: the same key stands there twice")
        callers[_digest(key)] = Caller(tenant or _tenant_of(key), is_admin=admin_key is None)
    if admin_key is not None:
        if not _KEY.fullmatch(admin_key):
            raise OptionError("admin_api_key: a key is 1 to 512 printable ASCII characters without spaces")
        if not callers:
            raise OptionError("admin_api_key protects nothing without api_key or api_key_file: give one of them too")
        if _digest(admin_key) in callers:
            raise OptionError("admin_api_key is also an ordinary key; it must be one of its own")
        callers[_digest(admin_key)] = Caller("admin#")
    elif options.enable_admin_api and len({caller.tenant for caller in callers.values()}) > 1:
        raise OptionError(
            "enable_admin_api with several tenants needs admin_api_key: one could end the others' requests"
        )
    return list(callers.items())


def _given(options: ServerOptions) -> Iterator[tuple[str, str | None, str]]:
    """Each key, its tenant, and where it stands (which is all that an error may say of it)."""
    for number, key in enumerate(options.api_key, start=1):
        yield key, None, f"api_key {number}"
    if options.api_key_file is None:
        return
    try:
        lines = Path(options.api_key_file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise OptionError(f"api_key_file {options.api_key_file}: {reason}") from None
    num_keys = 0
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise OptionError(f"{options.api_key_file}, line {number}: a line is a key, or a key and a tenant's name")
        num_keys += 1
        yield words[0], words[1] if len(words) == 2 else None, f"{options.api_key_file}, line {number}"
    if not num_keys:
        raise OptionError(f"api_key_file {options.api_key_file} has no keys; without one nobody could call")
