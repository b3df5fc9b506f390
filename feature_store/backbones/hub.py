"""Whether published weights can be had, asked before a library that would try for half a minute.

Only a file that is not in the cache yet needs the hub; then one connection to it is tried first, for a few seconds.
Behind a proxy nothing is tried: only the library knows how to get through.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import timm
from huggingface_hub import constants, try_to_load_from_cache

from labeler.errors import TryAgain

CONNECT_S = 3.0
_FILES = ("model.safetensors", "pytorch_model.bin")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def check_hub_reachable(architecture: str) -> None:
    """Refuse at once where the published weights of an architecture are neither kept here nor to be had.

    Raises:
        TryAgain: the hub does not answer.
    """
    config = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
    repository = getattr(config, "hf_hub_id", None)
    if not repository or _is_cached(repository) or any(os.environ.get(name) for name in _PROXIES):
        return
    where = urlsplit(constants.ENDPOINT)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError
        with socket.create_connection((where.hostname or "", where.port or 443), timeout=CONNECT_S):
            return
    except OSError:
        raise TryAgain(
            f"the published weights of {architecture!r} are not kept on this machine, and the hub cannot be reached. "
            "efficientnet-lite0 needs no download; or download a safetensors file elsewhere and name it with "
            f"--backbone FILE.safetensors --architecture {architecture}"
        ) from None


def _is_cached(repository: str) -> bool:
    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in _FILES)
