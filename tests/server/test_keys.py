"""Which keys there are and whose they are; what is said of those that cannot be used, and that it never names one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from noria.config import ServerOptions
from noria.errors import OptionError
from noria.server.keys import Caller, Keys


def keys(tmp_path: Path, text: str | None = None, **options: Any) -> Keys:
    if text is not None:
        (tmp_path / "keys").write_text(text)
        options["api_key_file"] = str(tmp_path / "keys")
    return Keys(ServerOptions(**options))


def test_without_keys_everybody_is_the_same_and_may_do_everything(tmp_path: Path) -> None:
    found = keys(tmp_path)
    assert not found.are_needed
    assert found.find("") == found.find("whatever") == Caller(None, is_admin=True)


def test_each_key_has_a_tenant(tmp_path: Path) -> None:
    found = keys(tmp_path, "# ours\nk1 alice\n\nk2\tbob\n  k3\nk4 alice\n", api_key=("k5",))
    tenants = {key: getattr(found.find(key), "tenant", None) for key in ("k1", "k2", "k3", "k4", "k5")}
    assert (tenants["k1"], tenants["k2"], tenants["k4"]) == ("alice", "bob", "alice")
    assert len(set(tenants.values())) == 4, "a key without a name shares its tenant with nobody"
    for wrong in ("", "k", "k11", "K1", "# ours", "alice", "k1 alice"):
        assert found.find(wrong) is None, wrong


def test_the_admin_key_alone_is_the_admins(tmp_path: Path) -> None:
    found = keys(tmp_path, "k1 alice\n", admin_api_key="root")
    alice, admin = found.find("k1"), found.find("root")
    assert alice is not None
    assert admin is not None
    assert not alice.is_admin
    assert admin.is_admin


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "has no keys"),
        ("# nothing\n", {}, "has no keys"),
        ("k1 alice bob\n", {}, "line 1"),
        ("\nsecret1 al/ice\n", {}, "line 2.*tenant"),
        ("sécret1 alice\n", {}, "line 1.*printable ASCII"),
        ("secret1\nsecret1 alice\n", {}, "line 2.*twice"),
        ("secret1\n", {"api_key": ("secret1",)}, "twice"),
        ("secret1\n", {"admin_api_key": "secret1"}, "also an ordinary key"),
        ("secret1 a\nsecret2 b\n", {"enable_admin_api": True}, "needs admin_api_key"),
        (None, {"api_key": ("",)}, "api_key 1"),
        (None, {"api_key": ("secret 1",)}, "api_key 1"),
        (None, {"admin_api_key": "secret1"}, "protects nothing"),
        (None, {"api_key": ("k",), "admin_api_key": ""}, "admin_api_key"),
        (None, {"api_key_file": "/no/such/file"}, "No such file"),
    ],
)
def test_what_cannot_be_used_is_told_without_the_key(
    tmp_path: Path, text: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        keys(tmp_path, text, **options)
    assert "secret1" not in str(caught.value)


def test_reading_the_file_again_takes_what_is_new_and_keeps_what_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = keys(tmp_path, "k1 alice\n")
    (tmp_path / "keys").write_text("k2 bob\n")
    found.reload()
    assert found.find("k1") is None
    assert found.find("k2") == Caller("bob")
    (tmp_path / "keys").write_text("")
    with caplog.at_level(logging.ERROR):
        found.reload()
    assert found.find("k2") == Caller("bob")
    assert "stay as they were" in caplog.text


def test_keys_without_a_name_keep_their_tenants_when_the_file_has_another_order(tmp_path: Path) -> None:
    found = keys(tmp_path, "k1\nk2\n", api_key=("k0",))
    before = {key: found.find(key) for key in ("k0", "k1", "k2")}
    (tmp_path / "keys").write_text("k3\nk2\nk1\n")
    found.reload()
    assert {key: found.find(key) for key in before} == before
    assert found.find("k3") not in before.values()


def test_options_do_not_show_their_secrets() -> None:
    shown = repr(ServerOptions(api_key=("secret1",), admin_api_key="secret2"))
    assert "secret" not in shown.replace("is_secret", "")
