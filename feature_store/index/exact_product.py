"""Similarities on a device, exact: which products of half precision rows are integers, and the switches that say so.

**Inputs.** An admitted row (see geometry) holds integers of at most 2048 in absolute value and has a squared norm below
2^24. float16 has 11 significant bits, so it holds every integer up to 2048 = 2^11 exactly (2^11 itself is a power of
two); so does TF32. Rows are therefore kept as float16: as many bytes as on disk. bfloat16 has 8 bits and would not do.

**Products and sums.** Two such numbers multiply to an integer of at most 2^22, which the multipliers of tensor cores
and of float32 hold exactly. By Cauchy and Schwarz the sum over *any* subset of coordinates stays below 2^24 in
absolute value, so every partial sum, in whatever order and grouping, is an integer that float32's 24 bits hold. An
accumulator that aligns its summands to the largest and cuts off what lies below 24 bits cuts nothing off an integer.
So

    torch.mm(queries float16, records float16.T, out_dtype=torch.float32)

is exact for every dimension and every admitted grid, provided the sum is *kept in float32*: no limbs are needed. It is
not exact where partial sums are rounded to half precision, or kept in fewer than 24 bits. Switches that allow the first
are off for the time of a product and set back to what they were; the second is found by the probe (`device_probe`)
before anybody pays, and by four random queries in full at every load (`load_check`).

On a processor, and where a device lacks this product, a tile of records is converted to float32 first and multiplied in
float32. TF32 would do no harm there, bfloat16 would ("medium" precision on a processor): both are off.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(queries float16 (nq, d), records float16 (n, d)) -> similarities float32 (nq, n)."""

_LOCK = threading.RLock()


def half_product(queries: Tensor, records: Tensor) -> Tensor:
    """On tensor cores: float16 in, float32 sums out."""
    return torch.mm(queries, records.T, out_dtype=torch.float32)


def single_product(queries: Tensor, records: Tensor) -> Tensor:
    """The same in float32; `records` is a tile, so that no whole set is converted."""
    return torch.mm(queries.float(), records.float().T)


def product_of(device: torch.device) -> Product:
    """The product that is exact on this kind of device, and fastest."""
    return half_product if device.type == "cuda" else single_product


@contextlib.contextmanager
def exact_sums() -> Iterator[None]:
    """Sums in float32 and nothing less, whatever this process has allowed elsewhere; set back afterwards.

    The switches belong to the process, so one search at a time holds them.
    """
    matmul: Any = torch.backends.cuda.matmul
    processor: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch does not type it
    wanted: list[tuple[Any, str, object]] = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_accumulation", False),
        (matmul, "fp32_precision", "ieee"),
        (processor, "fp32_precision", "ieee"),
    ]
    with _LOCK, torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        try:
            for owner, name, value in wanted:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
