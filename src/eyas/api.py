"""A server with OpenAI's API, as far as eyas asks one: vLLM, SGLang, or anything like them.

Standard library only. Raises EyasError with the server's own words.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any, TypeVar, cast

from eyas.errors import EyasError

T = TypeVar("T")
TIMEOUT = 600.0  # seconds, of one answer


def in_background(work: Callable[..., T], *given: Any) -> Future[T]:
    """work(*given), in a daemon thread of its own.

    The threads of a pool are waited for when Python ends: who is interrupted would wait for every request under way.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="eyas-ask", daemon=True).start()
    return future


class Api:
    """url: with or without /v1, as http://host:8000/v1. model: the first one that the server names."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        if not self.root.startswith(("http://", "https://")):
            raise EyasError(f"{self.root} is no URL: give it as http://host:8000/v1")
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        try:
            with self.open("/v1/models", timeout=30) as reply:
                models = json.load(reply)
        except (OSError, ValueError) as error:
            raise EyasError(f"{self.root}/v1/models gives no answer ({error}): is the server up?") from None
        try:
            self.model = str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EyasError(f"{self.root}/v1/models names no model: is this an OpenAI-compatible server?") from None

    def open(self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT) -> IO[bytes]:
        """The reply to a GET, or to a POST of `body`. Raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data=data, headers=self.headers)
        try:
            return cast(IO[bytes], urllib.request.urlopen(request, timeout=timeout))
        except http.client.HTTPException as error:  # what answers speaks no HTTP
            raise OSError(f"no HTTP answer: {type(error).__name__}") from None

    def refused(self, error: Exception) -> EyasError:
        """What a request that failed comes to."""
        if isinstance(error, urllib.error.HTTPError):
            said = error.read(300).decode(errors="replace")
            return EyasError(f"{self.root} refused a prompt ({error.code}): {' '.join(said.split())}")
        return EyasError(f"{self.root} gave no answer: {error}")
