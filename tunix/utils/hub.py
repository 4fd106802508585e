"""Models of the Hugging Face hub: the only file that talks to it."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Sequence

from tunix.utils import optional

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TOKEN = "set HF_TOKEN to a token of that account (or `hf auth login`)"

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Of a tokenizer, and configurations."""


def is_id(name: str) -> bool:
  """Whether a name may be a hub id.

  "models/typo" next to a folder "models" is a mistyped path: asking the network for it
  would take long and end in a message about ids.
  """
  return bool(_ID.fullmatch(name)) and not pathlib.Path(name).parent.is_dir()


def download(
  name: str, files: Sequence[str], revision: str | None = None
) -> pathlib.Path:
  """The folder in the hub's cache that holds a model, downloaded where it does not yet.

  Args:
    name: "owner/name".
    files: patterns of names; what else the folder holds was downloaded before.
    revision: a commit, tag or branch; None: the newest commit of the main branch.

  Raises:
    FileNotFoundError: it cannot be had; says why.
  """
  hub = optional.require("huggingface_hub", f"downloading {name!r}", "huggingface_hub")
  from huggingface_hub import errors

  try:
    folder = hub.snapshot_download(name, revision=revision, allow_patterns=[*files])
    return pathlib.Path(folder)
  except errors.GatedRepoError as error:
    raise FileNotFoundError(
      f"the model {name!r} is gated: accept its terms on its page at the hub, and "
      f"{_TOKEN}"
    ) from error
  except errors.RevisionNotFoundError as error:
    raise FileNotFoundError(
      f"the model {name!r} has no revision {revision!r}: give a commit, tag or branch "
      "that its page at the hub lists"
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise FileNotFoundError(
      f"there is no folder {name}, and no model {name!r} at the hub that can be "
      "seen: check the name; for a private one set HF_TOKEN"
    ) from error
  except OSError as error:
    reason = str(error).strip().partition("\n")[0]
    raise FileNotFoundError(
      f"there is no folder {name}, and downloading it as a hub id failed ({reason}): "
      "check the name and the network, or download it by hand"
    ) from error


def commit_of(folder: pathlib.Path) -> str | None:
  """The commit whose files a folder of the hub's cache holds; None: it is another
  folder."""
  return folder.name if folder.parent.name == "snapshots" else None


def is_cached(hub_id: str, file: str, revision: str | None = None) -> bool:
  """Whether a file of a repository was downloaded before."""
  if importlib.util.find_spec("huggingface_hub") is None:
    return False
  import huggingface_hub

  found = huggingface_hub.try_to_load_from_cache(hub_id, file, revision=revision)
  return isinstance(found, str)
