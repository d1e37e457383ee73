"""Where what is derived from data is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$THRICE_CACHE, else $XDG_CACHE_HOME/thrice, else ~/.cache/thrice. It need not exist yet."""
    if chosen := os.environ.get("THRICE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "thrice"
    return Path.home() / ".cache" / "thrice"
