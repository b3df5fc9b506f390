"""The connection of the Python client: HTTPS with a token, retries where they are safe, refusals, and bodies.

Only idempotent requests are retried: reads, cancellations, enrolments, and submissions, which carry an idempotency key.
A refused request is not retried, except after "too many requests" and "not now".

Vectors are sent as numbers or as a Parquet file, images as parts of a form. A form is read from its files while it is
sent, and can be sent again from the start.
"""

from __future__ import annotations

import io
import random
import re
import secrets
import ssl
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from api.schema import Problem
from feature_store.image_files import ENDINGS, Skipped, list_images, zip_members
from labeler.errors import InvalidSetting, LabelerError, TooLarge, TryAgain, exit_code_of
from labeler.settings import check_names_are_text, check_names_have_no_controls, given
from labeler.system.http_client import http_client, is_loopback, read_parts, read_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from feature_store.shard import Shard

AGAIN = frozenset({429, 502, 503, 504})
STRANGER_PATIENCE_S = 4.0
"""Time that an address has to answer for the first time; a wrong one is found out in twice this."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_TOKEN = re.compile(r"[!-~]{1,1000}")
"""Characters that a header can carry; a newline at the end, as files have it, is stripped first."""
_MAX_PROBLEM_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest answer that is held in memory, and largest event of a stream."""

Result = TypeVar("Result")


class ServiceProblem(LabelerError):
    """The service refused.

    Attributes:
        type: stable name of the reason, "urn:labeler:problem:..."; empty where the service sent no problem document.
        status: HTTP status; 0 where no answer came.
        members: further members of the document; for a refusal for budget these are account, level, left_nano, ...
    """

    problem_type = "service-problem"

    def __init__(
        self, *, type: str, status: int, title: str, detail: str, members: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{title}: {detail}" if detail else title)
        self.type = type
        self.status = status
        self.title = title
        self.detail = detail
        self.members = dict(members or {})
        # Whatever refuses, this machine or a service: one mistake has one exit code.
        code = exit_code_of(type)
        if code is not None:
            self.exit_code = code  # type: ignore[misc]  # of the class, but for a refusal that names another


class ServiceBusy(ServiceProblem, TryAgain):
    """The service could not be reached or could not answer now; the same call may succeed later."""

    problem_type = "service-busy"
    exit_code = 75
    retry_after_s = 0.0


class ServiceConnection:
    """A connection to one service.

    Args:
        url: https://..., or http:// to this machine only: a token must not travel unencrypted.
        token: access token; never printed.
        timeout_s: longest silence within one request.
        patience_s: how long a repeatable request is retried.
        absent_patience_s: the same while nothing answers at all. When None: STRANGER_PATIENCE_S until the address has
            answered once, then `patience_s`.
        ca_file: PEM file of the authority that signed the service's certificate; the system's when None.

    Raises:
        InvalidSetting: the URL, the token or the file cannot be used; no refusal repeats a secret.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float,
        patience_s: float,
        ca_file: Path | None,
        absent_patience_s: float | None = None,
    ) -> None:
        if not isinstance(url, str) or not isinstance(token, str):
            what = "the service's URL" if not isinstance(url, str) else "the access token"
            raise InvalidSetting(f"{what} must be a text; is the variable that holds it set?")
        token = token.strip()
        _check(url)
        if _TOKEN.fullmatch(token) is None:
            raise InvalidSetting(
                "the access token is empty, or has a character that no token has; copy all of it again"
            )
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._absent_patience_s = absent_patience_s
        self._has_answered = False
        try:
            self._http = http_client(
                self.url,
                ca_file=None if ca_file is None else str(ca_file),
                read_s=timeout_s,
                headers={"Authorization": f"Bearer {token}"},
            )
        except OSError as error:
            raise InvalidSetting(f"the CA file cannot be used: {error.strerror or 'malformed'}") from None

    def __repr__(self) -> str:
        return f"Connection({self.url!r})"

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        repeat: bool,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request and return the body of its answer.

        Args:
            content: a body that can be iterated again for every try.
            repeat: whether the request is idempotent.
            timeout_s: replaces the connection's.

        Raises:
            ServiceProblem: the service refused.
            ServiceBusy: no answer within the patience.
            TooLarge: the answer is larger than any that is read.
        """
        asked: dict[str, Any] = {"headers": dict(headers or {}), "params": given(params or {}), "json": json}
        if timeout_s is not None:
            asked["timeout"] = timeout_s

        def send() -> bytes:
            try:
                self._meet()
                # A fresh iterator for every try: the body may have been half sent.
                body = None if content is None else iter(content)
                with self._http.stream(method, path, content=body, **asked) as response:
                    if response.is_error:
                        raise problem_in(response)
                    return read_whole(response, MAX_ANSWER_BYTES)
            except httpx2.RequestError as error:
                raise self._unreachable(error) from None

        return self.repeated(send) if repeat else send()

    def readiness(self) -> bytes:
        """Return the body of /readyz. Its 503 is an answer, so it is not retried."""
        try:
            self._meet()
            with self._http.stream("GET", "/readyz") as response:
                body = read_whole(response, MAX_ANSWER_BYTES)
        except httpx2.RequestError as error:
            raise self._unreachable(error) from None
        if response.status_code not in (200, 503) or b"checks" not in body:
            raise problem_in(response, body)
        return body

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        most_bytes: int,
    ) -> Iterator[Iterator[bytes]]:
        """Stream the parts of an answer; one try.

        Raises:
            ServiceProblem: the service refused.
            ServiceBusy: it cannot be reached, or the answer broke off.
            TooLarge: the answer has more bytes than this.
        """
        try:
            self._meet()
            with self._http.stream("GET", path, params=given(params or {}), headers=dict(headers or {})) as response:
                if response.is_error:
                    raise problem_in(response)
                yield read_parts(response, most_bytes)
        except httpx2.RequestError as error:
            raise self._unreachable(error) from None

    def repeated(self, action: Callable[[], Result], *, is_waiting: bool = False) -> Result:
        """Return the result of an action that may be tried again, after growing pauses.

        Args:
            is_waiting: the service answered before; wait for it through restarts.

        Raises:
            ServiceBusy: the last try's, at the end of the patience.
        """
        begun = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except ServiceBusy as error:
                # Jitter, so that a hundred clients of a restarted service do not all retry at once.
                wait_s = max(error.retry_after_s, pause_s * (0.5 + random.random()))
                patience_s = self._patience_s
                if not error.status and not is_waiting:
                    stranger_s = patience_s if self._has_answered else STRANGER_PATIENCE_S
                    absent_s = stranger_s if self._absent_patience_s is None else self._absent_patience_s
                    patience_s = min(patience_s, absent_s)
                if time.monotonic() + wait_s > begun + patience_s:
                    raise
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _meet(self) -> None:
        """Find out, before the first request, that something answers at the address: a request may take a minute."""
        if not self._has_answered:
            with self._http.stream("GET", "/healthz", timeout=STRANGER_PATIENCE_S):
                self._has_answered = True

    def _unreachable(self, error: httpx2.RequestError) -> ServiceBusy:
        untrusted = _untrusted(error)
        if untrusted is not None:
            title = f"the certificate of {self.url} is not trusted"
            why = f"{untrusted.verify_message}; give the file of its authority (ca_file, LABELER_CA_FILE)"
        elif isinstance(error, httpx2.ConnectError):
            title, why = f"nothing answers at {self.url}", "is the service running there, and is this its address?"
            if "SSL" in str(error):
                why = "what answers there does not speak TLS; check the port, or begin with http:// on this machine"
        elif isinstance(error, httpx2.TimeoutException):
            title, why = (
                f"no answer from {self.url} in time",
                "is this the service's address and port, and does it run?",
            )
        else:
            title, why = f"no answer from {self.url}", f"{type(error).__name__}; is the service running there?"
        return ServiceBusy(type="", status=0, title=title, detail=why)


def _untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the certificate error that broke the connection; None for another cause."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def problem_in(response: httpx2.Response, body: bytes | None = None) -> ServiceProblem:
    """Return the problem in a refusal; a proxy's refusal has no problem document and is described by its status.

    Args:
        response: a streamed one.
        body: where it was read already.
    """
    title = f"the service answered {response.status_code} {response.reason_phrase}"
    problem = Problem(type="", status=response.status_code, title=title, detail="")
    with suppress(ValueError, TooLarge):
        problem = Problem.model_validate_json(read_whole(response, _MAX_PROBLEM_BYTES) if body is None else body)
    kind = ServiceBusy if response.status_code in AGAIN else ServiceProblem
    found = kind(
        type=problem.type,
        status=problem.status,
        title=problem.title,
        detail=problem.detail,
        members=problem.model_extra,
    )
    after = response.headers.get("Retry-After", "")
    if isinstance(found, ServiceBusy) and after.isdigit():
        found.retry_after_s = float(after)
    return found


def _check(url: str) -> None:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        raise InvalidSetting("the service's URL is malformed; it looks like https://labels.example.org") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        # URLs appear in errors and logs, and this part may hold a password or a token.
        raise InvalidSetting(
            "the service's URL is an address alone, like https://labels.example.org: without what stands before an @, "
            "and without what follows a ? or #. A token goes into --token or LABELER_TOKEN"
        )
    if parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host)):
        return
    raise InvalidSetting(
        "the service's URL must be https://..., or http:// to this machine; found "
        f"{f'{parsed.scheme}://{parsed.host}' if parsed.host else 'neither'}. "
        "A token sent in clear could be read on the way."
    )


def lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of an event stream.

    Raises:
        TooLarge: one does not end.
    """
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" in part:
            *whole, last = rest.split(b"\n")
            yield from (line.decode("utf-8", "replace").removesuffix("\r") for line in whole)
            rest = last
        if len(rest) > MAX_ANSWER_BYTES:
            raise TooLarge(f"a line of the event stream has more than {MAX_ANSWER_BYTES} bytes. Is the URL right?")


CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, repr=False)
class Part:
    """One part of a form.

    Attributes:
        content: its bytes, or the file that holds them; a file is open only while it is sent.
        file_name: its name at the service; "" for a plain field.
    """

    field: str
    content: bytes | Path
    file_name: str = ""

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


class FormBody:
    """A form body of known length.

    Args:
        parts: in sending order.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._boundary = f"labeler-{secrets.token_hex(16)}"

    @property
    def headers(self) -> dict[str, str]:
        """Content-Type with the boundary, and Content-Length."""
        ending = len(self._end())
        length = sum(len(self._head(part)) + part.size + 2 for part in self._parts) + ending
        return {
            "Content-Type": f"multipart/form-data; boundary={self._boundary}",
            "Content-Length": str(length),
        }

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield self._head(part)
            if isinstance(part.content, bytes):
                yield part.content
            else:
                with part.content.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            yield b"\r\n"
        yield self._end()

    def _head(self, part: Part) -> bytes:
        disposition = f'Content-Disposition: form-data; name="{_quoted(part.field)}"'
        kind = ""
        if part.file_name:
            disposition += f'; filename="{_quoted(part.file_name)}"'
            kind = "\r\nContent-Type: application/octet-stream"
        return f"--{self._boundary}\r\n{disposition}{kind}\r\n\r\n".encode()

    def _end(self) -> bytes:
        return f"--{self._boundary}--\r\n".encode()


def _quoted(name: str) -> str:
    # An HTTP quoted string, which decodes exactly. Browsers write a quote as %22, which a name may also contain.
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return quoted.replace("\r", "%0D").replace("\n", "%0A")


BYTES_OF_A_GROUP = 8 * 1024 * 1024
_ROWS_LOOKED_AT = 4096


def is_shard(path: Path) -> bool:
    """Return whether a folder is a shard rather than a folder of images."""
    return (path / "manifest.json").is_file()


def public_shard(path: Path) -> Shard:
    """Open a shard whose features may be sent.

    Raises:
        InvalidSetting: it is private.
        BadData: it is damaged.
    """
    from feature_store.shard import Shard  # imported here: reading a job needs no arrays

    shard = Shard.open(path)
    if not shard.is_public:
        raise InvalidSetting(f"{path.name!r} is a private shard, which is never sent; name a public one")
    return shard


def vectors_of(features: ArrayLike) -> NDArray[np.float64]:
    """Convert feature vectors to float64; text and other types are refused, not parsed.

    Raises:
        InvalidSetting: not an array of finite real numbers with a row for each query.
    """
    import numpy as np  # imported here: reading a job needs no arrays, and the import is slow

    try:
        given = np.asarray(features)
    except ValueError:
        raise InvalidSetting("features: the vectors of one job have one length each") from None
    if np.ma.isMaskedArray(features) or given.dtype.kind not in "fiu":
        found = "a masked array" if np.ma.isMaskedArray(features) else f"dtype {given.dtype}"
        raise InvalidSetting(f"features are real numbers, in an array of floats; found {found}")
    if given.ndim != 2:
        raise InvalidSetting(f"features have shape (queries, dimension), found {given.shape}")
    vectors = given.astype(np.float64, copy=False)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
        raise InvalidSetting(
            f"features: {bad.size} of {len(vectors)} vectors have NaN or infinite numbers, the first in row {bad[0]}; "
            "leave them out"
        )
    return vectors


def parquet_of(features: NDArray[np.float64], names: Sequence[str] | None) -> bytes:
    """Write feature vectors as a Parquet file, with the names the service would give them in a request."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if names is not None and len(names) != len(features):
        raise InvalidSetting(f"{len(features)} feature vectors came with {len(names)} query_ids; give one for each")
    known = [f"query-{number:06d}" for number in range(len(features))] if names is None else list(names)
    written = _short(features)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(written.reshape(-1)), features.shape[1])
    rows_of_a_group = max(1, BYTES_OF_A_GROUP // max(1, features.shape[1] * written.itemsize))
    with io.BytesIO() as file:
        # Uncompressed: equal vectors compress so well that the service would take the file for a bomb.
        table = pa.table({"name": pa.array(known, pa.string()), "feature": rows})
        pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=rows_of_a_group)
        return file.getvalue()


def _short(features: NDArray[np.float64]) -> NDArray[np.float64 | np.int16]:
    """Shrink vectors to a quarter of the bytes if all are quantized already; the service does not change those."""
    from feature_store.rows import on_grid

    starts = range(0, len(features), _ROWS_LOOKED_AT)
    if features.shape[1] and all(on_grid(features[start : start + _ROWS_LOOKED_AT]).all() for start in starts):
        return features.astype("int16")
    return features


def not_sent(images: Path | Sequence[Path]) -> tuple[Skipped, ...]:
    """List what of a folder is not sent and what of a zip is passed over, with reasons; nothing of other files.

    Raises:
        UnreadableFile: folders or links in the folder cannot be read or followed.
    """
    if not isinstance(images, Path):
        return ()
    if images.is_dir():
        found = list_images(images)
        return found.passed_over + found.left_out
    if images.suffix.lower() != ".zip" or not images.is_file():
        return ()
    # zipfile raises many exceptions on damaged files; the service names what is wrong with one.
    with suppress(Exception), zipfile.ZipFile(images) as archive:
        no_images = [one.no_image(archive) for one in zip_members(archive)]
        return tuple(dict.fromkeys(one for one in no_images if one is not None and one.is_passed_over))
    return ()


def image_parts(images: Path | Sequence[Path], leave_out: Collection[str]) -> list[Part]:
    """Make form parts of a folder, an archive, a Parquet file or single images; nothing is read yet.

    Raises:
        InvalidSetting: there is no image, or two share a name.
        UnreadableFile: folders or links in the folder cannot be read or followed.
    """
    if not isinstance(images, Path):
        if wrong := [one for one in images if not isinstance(one, Path)]:
            raise InvalidSetting(f"images are a Path, or several; found {type(wrong[0]).__name__}")
        parts = _parts([(path, path.name) for path in images])
        # A pipe would hold up who reads it.
        if wrong_kind := [path for path in images if not path.is_file()]:
            raise InvalidSetting(f"there is no file {wrong_kind[0].name!r}")
        return parts
    if images.is_dir():
        return _parts([(images / name, name) for name in list_images(images).images if name not in leave_out])
    if not images.is_file():
        raise InvalidSetting(f"there is no file or folder {images.name!r}")
    field = {".zip": "archive", ".parquet": "parquet"}.get(images.suffix.lower(), "images")
    return [Part(field, images, images.name)]


def _parts(files: list[tuple[Path, str]]) -> list[Part]:
    if not files:
        raise InvalidSetting(f"there is no image to send; known endings are {', '.join(sorted(ENDINGS))}")
    names = [name for _, name in files]
    check_names_are_text(names)
    check_names_have_no_controls(names)
    if wrong := next((name for name in names if "\\" in name), None):
        raise InvalidSetting(f"the name {wrong[:100]!r} has a backslash, which a service reads as a slash; rename it")
    if len(set(names)) != len(names):
        raise InvalidSetting("two images have the same name; names tell the labels apart, so give a folder instead")
    return [Part("images", path, name) for path, name in files]
