"""Downloads from and uploads to the Hugging Face hub; no other file connects to it."""

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

# Patterns of a tokenizer's files and of configurations.
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
# Second copies of the weights in the makers' own formats, which nothing here reads.
# That of gpt-oss 20B in original/ has 14 GB; Mistral's has the size of the model.
_COPIES = ("*/*.safetensors", "consolidated*.safetensors")


def is_id(name: str) -> bool:
  """Returns True if a name can be a hub id "owner/name".

  If the first part is an existing folder, the name counts as a mistyped path, for
  example "models/typo" with a folder "models". Looking it up on the hub would take long
  and give a confusing message.
  """
  return bool(_ID.fullmatch(name)) and not pathlib.Path(name).parent.is_dir()


def download(
  name: str, files: Sequence[str], revision: str | None = None
) -> pathlib.Path:
  """Downloads files of a model, and returns its folder in the hub's cache.

  Files that are in the cache already are not downloaded again. Second copies of the
  weights (`consolidated.safetensors`, weights in subfolders) are left out.

  Args:
    name: the hub id "owner/name".
    files: patterns of the names of the files.
    revision: a commit, tag or branch; None for the newest commit of the main branch.

  Raises:
    FileNotFoundError: the model cannot be downloaded; the message gives the reason.
  """
  hub = optional.require("huggingface_hub", f"downloading {name!r}", "huggingface_hub")
  from huggingface_hub import errors

  try:
    folder = hub.snapshot_download(
      name, revision=revision, allow_patterns=[*files], ignore_patterns=[*_COPIES]
    )
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
  """Returns the commit of a folder in the hub's cache; None for any other folder.

  The folder of a GGUF file (`gguf.folder`) links to the file in the hub's cache.
  """
  link = folder / "model.gguf"
  places = link.readlink().parents if link.is_symlink() else [folder]
  return next((x.name for x in places if x.parent.name == "snapshots"), None)


def is_cached(hub_id: str, file: str, revision: str | None = None) -> bool:
  """Returns True if a file of a repository is in the hub's cache."""
  if importlib.util.find_spec("huggingface_hub") is None:
    return False
  import huggingface_hub

  path = huggingface_hub.try_to_load_from_cache(hub_id, file, revision=revision)
  return isinstance(path, str)


def push(
  folder: str | os.PathLike[str],
  name: str,
  *,
  private: bool = False,
  message: str = "Upload",
) -> str:
  """Uploads the files of a folder as one commit; other files of the repository stay.

  Args:
    folder: the folder, for example an export.
    name: the hub id "owner/name", which is created if it does not exist.
    private: if True, a new repository is private.
    message: message of the commit.

  Returns:
    The address of the commit.

  Raises:
    FileNotFoundError: the folder does not exist.
    ValueError, OSError: see `create` and `upload`.
  """
  if not pathlib.Path(folder).is_dir():
    raise FileNotFoundError(f"there is no folder {folder} to upload")
  create(name, private=private)
  return upload(folder, name, message=message)


def create(name: str, *, private: bool = False) -> None:
  """Creates an empty model repository on the hub, if it does not exist.

  Args:
    name: the hub id "owner/name".
    private: if True, the repository is private.

  Raises:
    ValueError: the name is no hub id, no account is logged in, the account may not
      write to the repository, or the repository must be private and exists publicly.
    OSError: the hub cannot be reached, or refuses the request.
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
  """Uploads the files of a folder to an existing repository, see `push`.

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

  # The base class is an error of the HTTP client, which differs between versions of
  # huggingface_hub.
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
