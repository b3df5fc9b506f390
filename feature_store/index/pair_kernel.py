"""Products of int16 vectors summed in int32, and the best of them kept, as a kernel made for the processor at hand.

`vpmaddwd` multiplies two int16 of one vector with two of another and adds both products into an int32; `vpdpwssd`
(VNNI) adds them to a sum as well. That is two products per 32 bits where float32 has one, on half the bytes, and no
rounding anywhere. No library within reach offers it on processors of more than one maker (BENCHMARKS.md, "Exact search
on a processor"). So the few loops below are written in LLVM's own terms, and llvmlite compiles them in a tenth of a
second: for AVX2 and AVX-512, with VNNI or without. This is the only module that imports llvmlite.

Both sides are packed first. A panel of records holds, for one pair of coordinates after the other, that pair of each of
its `rows_per_panel` records; queries lie in groups of `queries_per_group` in the same way. `score` walks over groups
and panels with one sum per query and record in a register, and appends the keys (`definition`) of those above a query's
threshold and before its worst key.

**Exact.** Coordinates are at most 2048 in absolute value (`definition`), so a product is at most 2^22, and two of them
2^23: `vpmaddwd` cannot wrap (its one case is four times -32768). A sum over any subset of coordinates is below 2^24 by
Cauchy and Schwarz, so no partial sum comes near 2^31, whatever the order and the dimension. What is not admitted there
is refused at the door, by `check_features`, before it comes here.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import binding, ir

from feature_store.index.definition import RANK_BITS

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_POINTER, _NOTHING = ir.PointerType(), ir.VoidType()

_SIZES: Final = {"avx512bw": (16, 8, 3), "avx2": (8, 6, 2)}
"""int32 of a vector, queries of a group, vectors of a panel: as many sums as there are registers for."""


@dataclass(frozen=True, eq=False)
class PairKernel:
    """The kernel, compiled. Its functions let other threads run and check nothing.

    Attributes:
        instructions: what multiplies, for people.
        rows_per_panel, queries_per_group: how the two sides are packed.
        pack: (features int16 *, int16 per row, rows int64 *, panels, rows of a panel, d // 2, d % 2, out int32 *):
            row rows[i] goes to place i % rows-of-a-panel of panel i // rows-of-a-panel. A last coordinate
            without a partner has 0 for one.
        score: (records, panels, panels at a time, queries, groups, pairs of coordinates, records that count,
            ranks int64 *, thresholds int32 *, counts int64 *, keys int64 *, capacity, step, kept) -> next step. Every
            record whose similarity is above its query's threshold, and whose key is below keys[query, kept - 1], has
            it put at keys[query, counts[query]]. It stops before a step for which a query of the group lacks room, to
            be called again with that step. The last step is that of ceil(panels / panels at a time) * groups.
        code: keeps the compiled code alive.
    """

    instructions: str
    rows_per_panel: int
    queries_per_group: int
    pack: Callable[..., None]
    score: Callable[..., int]
    code: object


def compile_kernel(*, without: frozenset[str] = frozenset()) -> PairKernel:
    """The kernel for this processor.

    Args:
        without: features that it is compiled as if the processor lacked, as LLVM calls them; for tests.

    Raises:
        OSError: this processor lacks the instructions, or the system does not let a process run code that it has made.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    has = binding.get_host_cpu_features()
    has.update(dict.fromkeys(without, False))
    known = [name for name in _SIZES if has.get(name)]
    if not known or platform.machine().lower() not in ("x86_64", "amd64"):
        raise OSError(f"processor {binding.get_host_cpu_name()} has neither AVX2 nor AVX-512")
    if not _may_run_new_code():
        raise OSError("the system does not let a process run code that it has made (MemoryDenyWriteExecute, execmem)")
    width, group, vectors = _SIZES[known[0]]
    written = ir.Module("pairs")
    written.triple = binding.get_default_triple()
    _write_pack(written)
    _write_score(written, width, group, vectors, wide=known[0] == "avx512bw")
    module = binding.parse_assembly(str(written))
    module.verify()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=has.flatten(), opt=3
    )
    tuning = binding.create_pipeline_tuning_options(speed_level=1)
    builder = binding.create_pass_builder(target, tuning)
    builder.getModulePassManager().run(module, builder)
    code = binding.create_mcjit_compiler(module, target)
    code.finalize_object()
    address, number = ctypes.c_void_p, ctypes.c_int64
    pack = ctypes.CFUNCTYPE(None, address, number, address, *[number] * 4, address)
    score = ctypes.CFUNCTYPE(number, address, number, number, address, *[number] * 3, *[address] * 4, *[number] * 3)
    vnni = has.get("avx512vnni") if width == 16 else has.get("avxvnni") or has.get("avx512vnni")
    return PairKernel(
        instructions=f"{'vpdpwssd' if vnni else 'vpmaddwd'} of {32 * width} bits",
        rows_per_panel=width * vectors,
        queries_per_group=group,
        pack=pack(code.get_function_address("pack")),
        score=score(code.get_function_address("score")),
        code=code,
    )


def _may_run_new_code() -> bool:
    """Tell whether memory that was written may be made executable; LLVM ends the process where it may not."""
    protect = getattr(ctypes.CDLL(None), "mprotect", None) if hasattr(mmap, "PROT_EXEC") else None
    if protect is None:
        return True
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 0xC3
        start = ctypes.c_char.from_buffer(page)
        allowed = protect(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(mmap.PAGESIZE), 0b101) == 0
        if allowed:
            protect(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(mmap.PAGESIZE), 0b011)
        del start
    return bool(allowed)


def _number(value: int, kind: Any = _I64) -> Any:
    return ir.Constant(kind, value)


@contextlib.contextmanager
def _loop(to: Any, first: Any, last: Any) -> Iterator[Any]:
    """for place in range(first, last)."""
    head, body, done = (to.function.append_basic_block(name) for name in ("head", "body", "done"))
    with to.goto_entry_block():
        cell = to.alloca(_I64)
    to.store(first, cell)
    to.branch(head)
    to.position_at_end(head)
    place = to.load(cell, typ=_I64)
    to.cbranch(to.icmp_signed("<", place, last), body, done)
    to.position_at_end(body)
    yield place
    to.store(to.add(place, _number(1)), cell)
    to.branch(head)
    to.position_at_end(done)


def _at(to: Any, pointer: Any, place: Any, kind: Any) -> Any:
    return to.gep(pointer, [place], source_etype=kind)


def _load(to: Any, pointer: Any, place: Any, kind: Any, align: int | None = None) -> Any:
    value = to.load(_at(to, pointer, place, kind), typ=kind)
    if align is not None:
        value.align = align
    return value


def _write_pack(module: Any) -> None:
    kind = ir.FunctionType(_NOTHING, [_POINTER, _I64, _POINTER, *[_I64] * 4, _POINTER])
    function = ir.Function(module, kind, "pack")
    features, stride, rows, panels, width, full, odd, out = function.args
    to = ir.IRBuilder(function.append_basic_block())
    zero = _number(0)
    pairs = to.add(full, odd)
    with _loop(to, zero, panels) as panel:
        first = to.mul(panel, width)
        chosen = _at(to, rows, first, _I64)
        into = _at(to, out, to.mul(first, pairs), _I32)
        with _loop(to, zero, full) as pair:
            line = _at(to, into, to.mul(pair, width), _I32)
            with _loop(to, zero, width) as place:
                row = _at(to, features, to.mul(_load(to, chosen, place, _I64), stride), _I16)
                to.store(_load(to, row, pair, _I32, align=2), _at(to, line, place, _I32))
        with _loop(to, zero, odd) as _:
            line = _at(to, into, to.mul(full, width), _I32)
            with _loop(to, zero, width) as place:
                row = _at(to, features, to.mul(_load(to, chosen, place, _I64), stride), _I16)
                last = _load(to, row, to.mul(full, _number(2)), _I16)
                to.store(to.zext(last, _I32), _at(to, line, place, _I32))
    to.ret_void()


def _write_score(module: Any, width: int, group: int, vectors: int, *, wide: bool) -> None:
    sums, halves = ir.VectorType(_I32, width), ir.VectorType(_I16, 2 * width)
    name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    multiply = ir.Function(module, ir.FunctionType(sums, [halves, halves]), name)
    kind = ir.FunctionType(_I64, [_POINTER, _I64, _I64, _POINTER, *[_I64] * 3, *[_POINTER] * 4, *[_I64] * 3])
    function = ir.Function(module, kind, "score")
    records, panels, at_once, queries, groups, pairs, count, ranks, thresholds, counts, keys, capacity, begin, kept = (
        function.args
    )
    for pointer in (records, queries, ranks, thresholds, counts, keys):
        pointer.add_attribute("noalias")
    to = ir.IRBuilder(function.append_basic_block())
    zero, per_panel = _number(0), _number(width * vectors)
    cells = [[to.alloca(sums) for _ in range(vectors)] for _ in range(group)]
    tile = to.alloca(sums, size=_number(group * vectors))
    full = to.sub(capacity, to.mul(at_once, per_panel))
    parts = to.sdiv(to.sub(to.add(panels, at_once), _number(1)), at_once)

    def everywhere(value: Any) -> Any:
        """A vector that holds one int32 everywhere."""
        nothing = ir.Constant(sums, ir.Undefined)
        return to.shuffle_vector(to.insert_element(nothing, value, _number(0, _I32)), nothing, ir.Constant(sums, None))

    with _loop(to, begin, to.mul(parts, groups)) as step:
        part, first_query = to.sdiv(step, groups), to.mul(to.srem(step, groups), _number(group))
        with _loop(to, zero, _number(group)) as row:
            found = _load(to, counts, to.add(first_query, row), _I64)
            with to.if_then(to.icmp_signed(">", found, full)):
                to.ret(step)
        query = _at(to, queries, to.mul(first_query, pairs), _I32)
        start = to.mul(part, at_once)
        stop = to.add(start, at_once)
        stop = to.select(to.icmp_signed("<", stop, panels), stop, panels)
        with _loop(to, start, stop) as panel:
            first_record = to.mul(panel, per_panel)
            record = _at(to, records, to.mul(first_record, pairs), _I32)
            for line in cells:
                for cell in line:
                    to.store(ir.Constant(sums, None), cell)
            with _loop(to, zero, pairs) as pair:
                loaded = _at(to, record, to.mul(pair, per_panel), _I32)
                right = [_load(to, loaded, _number(v), halves, align=4) for v in range(vectors)]
                asked = _at(to, query, to.mul(pair, _number(group)), _I32)
                for row_number, line in enumerate(cells):
                    left = to.bitcast(everywhere(_load(to, asked, _number(row_number), _I32)), halves)
                    for cell, other in zip(line, right, strict=True):
                        to.store(to.add(to.load(cell, typ=sums), to.call(multiply, [left, other])), cell)
            for number, cell in enumerate(cell for line in cells for cell in line):
                to.store(to.load(cell, typ=sums), _at(to, tile, _number(number), sums))
            with _loop(to, zero, _number(group)) as row:
                asking = to.add(first_query, row)
                worst = _load(to, keys, to.add(to.mul(asking, capacity), to.sub(kept, _number(1))), _I64)
                threshold = everywhere(_load(to, thresholds, asking, _I32))
                with _loop(to, zero, _number(vectors)) as vector:
                    scores = _at(to, tile, to.add(to.mul(row, _number(vectors)), vector), sums)
                    above = to.icmp_signed(">", to.load(scores, typ=sums), threshold)
                    bits = to.zext(to.bitcast(above, ir.IntType(width)), _I32)
                    with _each_bit(to, bits) as bit:
                        place = to.add(first_record, to.add(to.mul(vector, _number(width)), bit))
                        with to.if_then(to.icmp_signed("<", place, count)):
                            similarity = to.sext(_load(to, scores, bit, _I32), _I64)
                            above_it = to.shl(to.sub(_number(1 << 24), similarity), _number(RANK_BITS))
                            key = to.or_(above_it, _load(to, ranks, place, _I64))
                            with to.if_then(to.icmp_signed("<", key, worst)):
                                found = _load(to, counts, asking, _I64)
                                to.store(key, _at(to, keys, to.add(to.mul(asking, capacity), found), _I64))
                                to.store(to.add(found, _number(1)), _at(to, counts, asking, _I64))
    to.ret(to.mul(parts, groups))


@contextlib.contextmanager
def _each_bit(to: Any, bits: Any) -> Iterator[Any]:
    """for each bit that is set, from the lowest."""
    head, body, done = (to.function.append_basic_block(name) for name in ("bits", "bit", "no_bit"))
    with to.goto_entry_block():
        cell = to.alloca(_I32)
    to.store(bits, cell)
    to.branch(head)
    to.position_at_end(head)
    left = to.load(cell, typ=_I32)
    to.cbranch(to.icmp_signed("!=", left, _number(0, _I32)), body, done)
    to.position_at_end(body)
    to.store(to.and_(left, to.sub(left, _number(1, _I32))), cell)
    yield to.zext(to.cttz(left, _number(1, ir.IntType(1))), _I64)
    to.branch(head)
    to.position_at_end(done)
