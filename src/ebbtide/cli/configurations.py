"""``hf:PATH``: a configuration of transformers on disk, read without transformers and without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ebbtide.errors import UsageError

__all__ = ["PREFIX", "name_of", "read_configuration"]

PREFIX = "hf:"
"""How the cases begin that name one."""
_FILE = "config.json"
_FORM = f"hf:PATH names a {_FILE} of transformers, or the folder that it is in"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read_configuration(text: str) -> dict[str, Any]:
    """What the file says that the case ``text`` names.

    Raises:
        UsageError: if there is none, or none that a model can be made of.
    """
    path = _path(text)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); {_FORM}", argument="case", value=text) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {_FORM}", argument="case", value=text) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{path} has no entry model_type; {_FORM}", argument="case", value=text)
    return values


def name_of(text: str) -> str:
    """What reports call the case: the file's name, or its folder's where it has the usual one."""
    path = _path(text).resolve()
    return path.parent.name if path.name == _FILE else path.stem


def _path(text: str) -> Path:
    """The file.

    Raises:
        UsageError: if there is no such file or folder.
    """
    named = text.removeprefix(PREFIX)
    if named and Path(named).is_file():
        return Path(named)
    if named and Path(named).is_dir():
        if (Path(named) / _FILE).is_file():
            return Path(named) / _FILE
        raise UsageError(f"there is no {_FILE} in {named}; {_FORM}", argument="case", value=text)
    if _HUB_NAME.fullmatch(named) and not named.endswith(".json"):
        why = (
            f"there is no folder {named}, and nothing is downloaded: if it is a name on Hugging Face's hub, download "
            f"https://huggingface.co/{named}/resolve/main/{_FILE} and name its path: hf:{_FILE}"
        )
    else:
        why = f"there is no file or folder {named}; {_FORM}"
    raise UsageError(why, argument="case", value=text)
