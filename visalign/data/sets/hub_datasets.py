# SPDX-License-Identifier: Apache-2.0
"""Datasets of the Hugging Face hub by id, as local Parquet files that the other readers read."""

from __future__ import annotations

import hashlib
import mimetypes
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.hub import go_offline_if_unreachable, hub_message

FORMS = "a dataset of the hub, owner/name, owner/name:split or owner/name/config:split"
_ID = re.compile(
    r"(hf:/?/?(?:datasets/)?|https:/?/huggingface\.co/datasets/)?"
    r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?(?:/([\w.-]+))?(?::([\w.\[\]%:-]+))?"
)


def find_table(source: str | Path) -> Path:
    """Return the path of a table: the source itself, or a local file of the dataset of the hub that it names.

    A dataset is named as in `FORMS`, with hf://datasets/ in front if one likes; "~" is the home folder.
    """
    match = _ID.fullmatch(str(source))
    path = Path(os.path.expanduser(source))
    is_file_name = path.suffix.lower() in (".jsonl", ".tsv", ".parquet") or mimetypes.guess_type(path.name)[0]
    if not match or path.exists() or (str(source).startswith(".") and not match[1]) or is_file_name:
        return path
    return _fetch(*match.groups()[1:])


@lru_cache(maxsize=16)
def _fetch(name: str, revision: str | None, config: str | None, split: str | None) -> Path:
    """Return a split as a Parquet file in the cache of the hub's library, written if it is not there."""
    outage = go_offline_if_unreachable()
    if outage and not _cached(name):
        raise UserError(f"There is no file or folder {name!r} here. {hub_message(name, 'dataset', outage)}")
    try:
        import datasets  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as error:
        raise UserError(f"{name!r} is a dataset of the hub: python -m pip install 'visalign[datasets]'.") from error
    offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, bool(outage)
    try:
        rows: Any = datasets.load_dataset(name, config, revision=revision, split=split)
    except FileNotFoundError as error:  # no such dataset, or one without rows
        raise UserError(f"There is no file or folder {name!r} here. {hub_message(name, 'dataset', error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(_why(name, error)) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    if split is None:
        if len(rows) > 1 and "train" not in rows:
            raise UserError(f"The dataset {name!r} has the splits {', '.join(rows)}. Write {name}:SPLIT.")
        split = "train" if "train" in rows else next(iter(rows))
        rows = rows[split]
    digest = hashlib.blake2b(repr((rows.cache_files, len(rows), split)).encode(), digest_size=8).hexdigest()
    stem = "-".join(filter(None, (name.partition("/")[2], config, split.partition("[")[0])))
    file = Path(datasets.config.HF_DATASETS_CACHE) / "visalign" / digest / f"{stem}.parquet"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
        rows.to_parquet(part)
        part.replace(file)
    return file


def _cached(name: str) -> bool:
    """Check whether the libraries have files of a dataset, without importing the slow one."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    prepared = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME) / "datasets"))
    folders = prepared / name.replace("/", "___"), Path(HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return any(folder.is_dir() for folder in folders)


def _why(name: str, error: Exception) -> str:
    """Word an error of the datasets library; of a configuration that is missing, list those there are."""
    text = " ".join(str(error).split())
    if match := re.search(
        r"(?:configs|Available|configurations|one of)[^:\[]*[:\s]*\[?([^\]]+?)(?:\]| Please|$)", text
    ):
        what, form = ("splits", ":SPLIT") if "one of" in match[0] else ("configurations", "/CONFIG:SPLIT")
        names = ", ".join(name.strip(" '\"") for name in match[1].split(","))
        return f"The dataset {name!r} has the {what} {names}. Write {name}{form}."
    return f"The dataset {name!r} cannot be read from the hub ({type(error).__name__}: {text:.300})."
