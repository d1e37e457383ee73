from pathlib import Path

import pytest

from thrice.data.cache import cache_folder


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("THRICE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/thrice")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/thrice")
    monkeypatch.setenv("THRICE_CACHE", "~/fast")
    assert cache_folder() == Path("/home/someone/fast")
