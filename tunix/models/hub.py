"""Models of the Hugging Face hub: the only file that talks to it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

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


def push(
  folder: str | os.PathLike[str],
  name: str,
  *,
  private: bool = False,
  message: str = "Upload",
) -> str:
  """Uploads the files of a folder as one commit; files that were there stay.

  Args:
    folder: such as an export.
    name: "owner/name", made where it is not there yet.
    private: whether others may not see it.
    message: of the commit.

  Returns:
    The address of the commit.

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError, OSError: see `create` and `upload`.
  """
  if not pathlib.Path(folder).is_dir():
    raise FileNotFoundError(f"there is no folder {folder} to upload")
  create(name, private=private)
  return upload(folder, name, message=message)


def create(name: str, *, private: bool = False) -> None:
  """Makes a model at the hub, without files, where there is none of that name.

  Args:
    name: "owner/name".
    private: whether others may not see it.

  Raises:
    ValueError: it is no name, nobody is logged in, that account may not write there, or
      it is to be private and is there already and public.
    OSError: the hub cannot be reached, or refuses it.
  """
  if not _ID.fullmatch(name):
    raise ValueError(f"{name!r} is no name of the hub: give 'owner/name'")
  with _writing(name):
    api = _api(name)
    api.create_repo(name, private=private or None, exist_ok=True)
    is_open = private and not api.model_info(name).private
  if is_open:
    raise ValueError(
      f"{name!r} is at the hub already, and public: make it private on its page, or "
      "give another name"
    )


def upload(folder: str | os.PathLike[str], name: str, *, message: str) -> str:
  """`push`, to a model that is there.

  Raises:
    ValueError, OSError: see `create`.
  """
  with _writing(name):
    return (
      _api(name)
      .upload_folder(repo_id=name, folder_path=folder, commit_message=message)
      .commit_url
    )


def _api(name: str) -> Any:
  hub = optional.require("huggingface_hub", f"uploading {name!r}", "huggingface_hub")
  return hub.HfApi()


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
  from huggingface_hub import errors

  # Of the HTTP client that huggingface_hub uses: which one differs by its version.
  client_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # pyright: ignore
  try:
    yield
  except errors.HfHubHTTPError as error:
    code, reason = error.response.status_code, str(error).strip().partition("\n")[0]
    if code == 401:
      raise ValueError(
        f"{name!r} cannot be written without logging in: set HF_TOKEN to a token with "
        "the right to write (or `hf auth login`)"
      ) from error
    if code == 403:
      raise ValueError(
        f"{name!r} cannot be written with this token: give one with the right to write "
        "there, or a name of your own account"
      ) from error
    raise OSError(f"{name!r} cannot be written ({reason}): try again later") from error
  except client_error as error:
    raise OSError(f"the hub cannot be reached ({error}): check the network") from error
